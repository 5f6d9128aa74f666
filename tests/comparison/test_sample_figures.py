"""Each sample has its figure: loud samples do not hide what the others lose, and samples that
stretch the range of an input are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.comparison.extents import ChannelExtents
from quantizer.errors import GateError, UsageError

INT8 = {"dtype": "int8", "qscheme": "per_tensor"}
CONFIG = {"global_quant_config": {"weight": INT8, "input_tensors": INT8}}
SIZES = (8, 5, 16, 1)
LARGE = 1e5


class Sensors(nn.Module):
    """Its outputs have samples along different axes, several rows a sample, or no samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.last(self.first(x).relu())
        steps = self.last(self.first(x).relu().unsqueeze(0).expand(3, -1, -1) * 0.5)
        return {
            "plain": y,
            "rows": y.reshape(-1, 2),
            "steps_first": steps,
            "steps_flat": steps.reshape(-1, 4),
            "doubled": torch.cat([y, y * 2], 0) * 0.5,
            "mean": y.mean(0),
            "joined": torch.cat([y * 100, y.sigmoid()], 1),
        }


def batches(sizes: Sequence[int] = SIZES, seed: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 8, generator=draw) for size in sizes]


def of_samples(pairs: list[tuple[Tensor, Tensor]], axis: int, rows: int) -> list[float]:
    """The SQNR of each sample, sorted, computed one by one."""
    ratios = []
    for x, y in pairs:
        for start in range(0, x.shape[axis], rows):
            expected = x.narrow(axis, start, rows).double()
            error = expected - y.narrow(axis, start, rows).double()
            ratios.append(
                float(10 * torch.log10(expected.square().sum() / error.square().sum()))
            )
    return sorted(ratios)


@pytest.fixture(scope="module")
def tested() -> tuple[dict[str, Any], dict[str, list[tuple[Tensor, Tensor]]]]:
    """The rows of all outputs and parts, and the values of both networks."""
    data = batches()
    data[2][7] *= 1e-3
    model = Sensors()
    result = quantizer.calibrate(model, CONFIG, data)
    rows = {row["name"]: row for row in result.test(data).to_json()["outputs"]}
    values: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for batch in data:
            quantized = result.network(batch)
            for name, x in model(batch).items():
                values.setdefault(name, []).append((x, quantized[name]))
    return rows, values


@pytest.mark.parametrize(
    ("name", "axis", "rows"), [("plain", 0, 1), ("rows", 0, 4 // 2), ("steps_first", 1, 1)]
)
def test_figures_are_those_of_samples(tested: Any, name: str, axis: int, rows: int) -> None:
    row, values = tested[0][name], tested[1][name]
    ratios = of_samples(values, axis, rows)
    assert len(ratios) == sum(SIZES) == row["samples"]["count"]
    assert row["sqnr_db_worst"] == pytest.approx(ratios[0], abs=1e-3), "one of thirty"
    assert row["sqnr_db_median"] == pytest.approx(ratios[14], abs=1e-3)


@pytest.mark.parametrize("name", ["mean", "steps_flat", "doubled"])
def test_outputs_without_samples_have_the_pooled_figure(tested: Any, name: str) -> None:
    row = tested[0][name]
    assert row["sqnr_db"] > 0
    assert row["sqnr_db_worst"] is row["sqnr_db_median"] is row["samples"] is None


def test_parts_have_figures_of_samples(tested: Any) -> None:
    rows, values = tested
    names = [name for name in rows if name.startswith("joined[")]
    assert len(names) == 2
    for name, part in zip(names, (slice(0, 4), slice(4, 8)), strict=True):
        pairs = [(x[:, part], y[:, part]) for x, y in values["joined"]]
        worst = of_samples(pairs, 0, 1)[0]
        assert rows[name]["sqnr_db_worst"] == pytest.approx(worst, abs=1e-3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Branching(Small):
    """Its code cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > -1e30 else x


def one_corrupt() -> list[Tensor]:
    data = batches((128,) * 4)
    data[2][3] *= LARGE
    return data


def two_corrupt() -> list[Tensor]:
    data = batches((64,) * 4)
    data[0][63] *= LARGE
    data[3][0] *= LARGE
    return data


def single_samples() -> list[Tensor]:
    data = batches((1,) * 12)
    data[5] *= LARGE
    return data


CORRUPT = {
    one_corrupt: ("1 sample of 512 stretches", ["batch 2, sample 3"]),
    two_corrupt: ("2 samples of 256 stretch", ["batch 0, sample 63", "batch 3, sample 0"]),
    single_samples: ("1 sample of 12 stretches", ["batch 5, sample 0"]),
}


def traced(data: list[Tensor]) -> quantizer.Comparison:
    return quantizer.calibrate(Small(), CONFIG, data).test(data)


@pytest.mark.parametrize("corrupt", CORRUPT)
def test_corrupt_samples_are_named_and_do_not_hide_the_others(
    corrupt: Callable[[], list[Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    comparison = traced(corrupt())
    text, names = CORRUPT[corrupt]
    [named] = [message for message in caplog.messages if "stretch" in message]
    assert text in named
    assert "Small::input_0" in named
    assert all(name in named for name in names)
    assert comparison.metrics["sqnr_db"] > 30
    assert comparison.metrics["sqnr_db_worst"] < 1, "all ordinary samples are lost"
    [warning] = comparison.warnings
    assert warning["kind"] == "samples"
    assert warning["text"] in caplog.messages


def test_a_bound_of_all_values_passes_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    comparison = traced(one_corrupt())
    caplog.clear()
    comparison.require(sqnr_db=30)
    [message] = caplog.messages
    assert "sqnr_db>=30 is met, but the worst samples have 0.0 dB" in message
    with pytest.raises(GateError, match="sqnr_db_worst>=20"):
        comparison.require(sqnr_db_worst=20)
    with pytest.raises(GateError):
        comparison.require(**{"sqnr_db_worst[0]": 20})


def test_quiet_samples_have_a_figure(caplog: pytest.LogCaptureFixture) -> None:
    data = batches((16,) * 4)
    for batch in data:
        batch[::2] *= 1e-3
    comparison = traced(data)
    assert comparison.metrics["sqnr_db"] > 30
    assert comparison.metrics["sqnr_db_worst"] < 1
    assert not [message for message in caplog.messages if "stretch" in message], "half are loud"


def test_ordinary_samples_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    comparison = traced(batches((64,) * 4))
    assert comparison.metrics["sqnr_db_worst"] > 20
    assert not comparison.warnings
    assert not [message for message in caplog.messages if "sample" in message]


def test_silent_samples_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    data = batches((8,) * 4)
    data[1][4] = 0
    data[3][7] *= 1e-7
    comparison = traced(data)
    samples = comparison.to_json()["outputs"][0]["samples"]
    assert (samples["count"], samples["silent"]) == (30, 2)
    assert samples["first_silent"] == ["batch 1, sample 4", "batch 3, sample 7"]
    assert comparison.metrics["sqnr_db_worst"] > 20, "they are not judged"
    [warning] = comparison.warnings
    assert warning["kind"] == "silent"
    assert "batch 1, sample 4; batch 3, sample 7" in warning["text"]


def test_equal_outputs_have_an_infinite_figure() -> None:
    config = {"global_quant_config": {"weight": {"dtype": "float32"}}}
    comparison = quantizer.calibrate(Small(), config, batches()).test(batches())
    assert comparison.metrics["sqnr_db_worst"] == comparison.metrics["sqnr_db"] == math.inf
    assert comparison.to_json()["metrics"]["sqnr_db_worst"] is None


def test_modules_in_place_name_corrupt_samples(caplog: pytest.LogCaptureFixture) -> None:
    made = quantizer.ModelQuantizer(quantizer.Config.from_dict(CONFIG))
    made.quantize_model(Branching(), one_corrupt())
    [named] = [message for message in caplog.messages if "stretch" in message]
    assert "batch 2, sample 3" in named


def test_a_range_that_clips_is_not_stretched(caplog: pytest.LogCaptureFixture) -> None:
    inputs = {**INT8, "observer_cls": "PerTensorPercentileObserver", "percentage": 98.0}
    config = {"global_quant_config": {"weight": INT8, "input_tensors": inputs}}
    data = batches((128,) * 4)
    data[2][3] *= 100
    quantizer.calibrate(Small(), config, data)
    assert not [message for message in caplog.messages if "stretch" in message]


class Averaging(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(0)


def test_a_gate_on_samples_needs_an_axis_of_samples() -> None:
    data = batches((8,) * 2)
    comparison = quantizer.calibrate(Averaging(), CONFIG, data).test(data)
    with pytest.raises(UsageError, match="there is no metric 'sqnr_db_worst'"):
        comparison.require(sqnr_db_worst=20)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(32, 8), nn.Linear(8, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.last(self.words(input_ids) * attention_mask.unsqueeze(-1))


def test_padding_is_no_part_of_a_sample() -> None:
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 3:] = 0
    mask[2, 5:] = 0
    ids = torch.randint(0, 32, (4, 7), generator=draw)
    batch = {"input_ids": ids, "attention_mask": mask}
    model = Text()
    result = quantizer.calibrate(model, CONFIG, [batch])
    row = result.test([batch]).to_json()["outputs"][0]
    ratios = []
    with torch.no_grad():
        x, y = model(**batch), result.network(**batch)
    for sample in range(4):
        tokens = mask[sample].bool()
        ratios += of_samples([(x[sample, tokens][None], y[sample, tokens][None])], 0, 1)
    assert row["sqnr_db_worst"] == pytest.approx(min(ratios), abs=1e-3)
    assert row["samples"]["count"] == 4


def test_channels_of_an_output_with_one_axis_have_an_error_each() -> None:
    """torch takes no axes for all of them, which would give every channel the sum."""
    extents = ChannelExtents.of(Tensor([100.0, 5.0, 7.0]), Tensor([101.0, 5.0, 7.5]), 0)
    assert extents is not None
    assert extents.error.tolist() == [1.0, 0.0, 0.25]
