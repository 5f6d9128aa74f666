"""What `attention_mask` excludes counts in no statistic: padded batches give what the sequences
give one at a time, to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.encoders import VOCABULARY, Encoder
from support.extended import extended_except
from torch import Tensor, nn
from torch.nn import functional

import quantizer
from quantizer import ModelQuantizer
from quantizer.errors import DataError
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.sources.arguments import Arguments
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches

LENGTHS = (7, 12, 4)
AS_HEADS = (2, 1)
"""The longest has as many positions as the encoder has heads."""
INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 8}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
INPUT = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": False}


def of_weights(algorithm: str, **spec: Any) -> dict[str, Any]:
    """A config for the weights of linear layers, with an algorithm."""
    return {
        "global_quant_config": {"weight": INT4, **spec},
        "algo_config": [{"name": algorithm}],
    }


CONFIGS = {
    "ranges and means": (document(include_bias_corr=True), LENGTHS),
    "as many positions as heads": (document(), AS_HEADS),
    "gptq": (of_weights("gptq"), LENGTHS),
    "qronos": (of_weights("qronos"), LENGTHS),
    "awq": (of_weights("awq"), LENGTHS),
    "smoothquant": (of_weights("smoothquant", weight=INT8, input_tensors=INPUT), LENGTHS),
}
USUAL = ("ranges and means", "as many positions as heads", "gptq", "smoothquant")


def sequences(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(
    lengths: tuple[int, ...], side: str, *, is_masked: bool = True
) -> list[dict[str, Tensor]]:
    """One batch of all sequences; token 0 is padding."""
    rows, masks = [], []
    for ids in sequences(lengths):
        missing = max(lengths) - len(ids)
        where = (missing, 0) if side == "left" else (0, missing)
        rows.append(functional.pad(ids, where))
        masks.append(functional.pad(torch.ones_like(ids), where, value=1 - is_masked))
    return [{"input_ids": torch.stack(rows), "attention_mask": torch.stack(masks)}]


def one_at_a_time(lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    calls = []
    for ids in sequences(lengths):
        calls.append({"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]})
    return calls


def state(config: dict[str, Any], data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All scales and weights of the quantized network."""
    result = quantizer.calibrate(Encoder().eval(), config, data)
    tensors: dict[str, Tensor] = result.network.state_dict()
    return tensors


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The tensors that are not the same in both, or are in one alone."""
    names = list(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        if not torch.equal(one[name], other[name]):
            names.append(name)
    return names


@pytest.mark.parametrize("name", extended_except(CONFIGS, *USUAL))
def test_padded_batches_give_what_their_sequences_give(name: str) -> None:
    config, lengths = CONFIGS[name]
    expected = state(config, one_at_a_time(lengths))
    for side in ("left", "right"):
        assert differing(state(config, padded(lengths, side)), expected) == [], side
    counted = state(config, padded(lengths, "right", is_masked=False))
    assert differing(counted, expected), "padding would change the result"


def test_modules_in_place_see_no_padding() -> None:
    config = {
        "global_quant_config": {"weight": INT8, "input_tensors": INPUT},
        "exclude": ["kind:embedding"],
    }
    left, counted = padded(LENGTHS, "left"), padded(LENGTHS, "right", is_masked=False)
    states = []
    for data in (one_at_a_time(LENGTHS), left, counted):
        model = ModelQuantizer(config).quantize_model(Encoder().eval(), data)
        states.append(model.state_dict())
    assert differing(states[1], states[0]) == []
    assert differing(states[2], states[0])


@pytest.mark.parametrize("parts_before", [2, 4])
def test_a_run_that_stops_within_a_batch_resumes_to_the_same_bits(
    parts_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = padded(LENGTHS, "left") + padded((3, 11, 5, 5), "right")
    expected = state(document(), data)
    observe = Network.observe
    count = 0

    def interrupted(network: Network, *call: Any) -> Any:
        nonlocal count
        count += 1
        if count > parts_before:
            raise KeyboardInterrupt
        return observe(network, *call)

    monkeypatch.setattr(Network, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantizer.calibrate(Encoder().eval(), document(), data, folder=tmp_path)
    monkeypatch.setattr(Network, "observe", observe)
    resumed = quantizer.calibrate(
        Encoder().eval(), document(), data, folder=tmp_path, resume=True
    )
    assert differing(resumed.network.state_dict(), expected) == []


def test_a_batch_of_padding_alone_is_an_error() -> None:
    [full, *_], [empty] = one_at_a_time(LENGTHS), padded(LENGTHS, "left")
    empty["attention_mask"] = torch.zeros_like(empty["attention_mask"])
    with pytest.raises(DataError, match="batch 1: attention_mask excludes every position"):
        quantizer.calibrate(Encoder().eval(), document(), [full, empty])


class Captioner(nn.Module):
    """An image, as high as the text is long, and two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.patches = nn.Embedding(VOCABULARY, 8), nn.Conv2d(3, 8, 2)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores = self.table(input_ids) * attention_mask[..., None]
        image = self.patches(pixel_values).mean((2, 3))
        other = self.table(decoder_input_ids)
        if decoder_attention_mask is not None:
            other = other * decoder_attention_mask[..., None]
        return scores.sum(1) + image, other


def call(**changes: Tensor) -> dict[str, Tensor]:
    """Three samples; the texts and the image have one size."""
    size = 6
    mask = torch.ones(3, size, dtype=torch.int64)
    mask[0, :2] = 0
    mask[1, 3:] = 0
    ids = torch.arange(3 * size).view(3, size)
    values = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(
            3, 3, size, size, generator=torch.Generator().manual_seed(0)
        ),
        "decoder_input_ids": ids + 20,
    }
    return values | changes


def parts(
    values: dict[str, Tensor], *, is_traced: bool = False, by_position: bool = False
) -> list[dict[str, Tensor]]:
    """What a call becomes."""
    args, kwargs = (), values
    if by_position:
        args, kwargs = tuple(values.values()), {}
    batch = Batch(args, kwargs, None, None)
    batches = Batches(lambda: iter([batch]), "data", arguments=Arguments(tuple(values)))
    graph = trace(Captioner().eval(), args, kwargs) if is_traced else None
    calls = []
    for part in batches.without_padding(graph):
        assert part.number == 0
        calls.append(dict(zip(values, part.args or part.kwargs.values(), strict=True)))
    return calls


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("is_traced", [False, True])
def test_values_of_the_same_size_are_not_cut(
    is_traced: bool, by_position: bool, caplog: pytest.LogCaptureFixture
) -> None:
    values = call()
    calls = parts(values, is_traced=is_traced, by_position=by_position)
    assert not caplog.records
    spans = [slice(2, 6), slice(0, 3), slice(0, 6)]
    assert len(calls) == len(spans)
    for row, (part, span) in enumerate(zip(calls, spans, strict=True)):
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(part[name], values[name][row : row + 1, span]), name
        for name in ("pixel_values", "decoder_input_ids"):
            assert torch.equal(part[name], values[name][row : row + 1]), name


@pytest.mark.parametrize("is_traced", [False, True])
def test_each_text_is_cut_by_its_own_mask(is_traced: bool) -> None:
    texts = call(decoder_attention_mask=torch.tensor([[1, 0, 0, 0, 0, 0]] * 3))
    calls = parts(texts, is_traced=is_traced)
    spans = [(slice(2, 6), slice(0, 1)), (slice(0, 3), slice(0, 1)), (slice(0, 6), slice(0, 1))]
    for row, (part, (source, target)) in enumerate(zip(calls, spans, strict=True)):
        assert torch.equal(part["input_ids"][0], texts["input_ids"][row, source])
        ids = texts["decoder_input_ids"]
        assert torch.equal(part["decoder_input_ids"][0], ids[row, target])


def test_sequences_of_one_span_stay_together() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    ids = torch.arange(12).view(4, 3)
    calls = parts({"input_ids": ids, "attention_mask": mask})
    assert [part["input_ids"].tolist() for part in calls] == [[[0, 1], [6, 7]], [[10, 11]]]


UNCHANGED = {
    "no padding": {"attention_mask": torch.ones(3, 6)},
    "added to scores": {"attention_mask": torch.zeros(3, 6)},
    "numbers of documents": {"attention_mask": torch.tensor([[0, 0, 1, 1, 2, 2]] * 3)},
    "between the ends": {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 3)},
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_masks_change_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    values = call(**UNCHANGED[name])
    [part] = parts(values)
    assert not caplog.records
    assert all(part[key] is value for key, value in values.items())


AMBIGUOUS = {
    "features of the same size": {"features": torch.zeros(3, 6, 5)},
    "patches of all images": {"pixel_values": torch.zeros(7, 4)},
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_padding_stays_with_a_warning_where_values_may_belong_to_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = call(**AMBIGUOUS[name])
    [part] = parts(values)
    assert all(part[key] is value for key, value in values.items())
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("batch 0 of data: its padding counts in the statistics")
