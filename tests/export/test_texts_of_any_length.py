"""Models of text, calibrated on texts of several lengths: test mode, generated code and files
take yet others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoders import POSITIONS, Encoder, sentences
from support.extended import extended
from support.generated import imported
from support.llamas import VOCABULARY, llama
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import quantizer
from quantizer.errors import DataError, ModelError, ResultError

pytestmark = pytest.mark.slow

CALIBRATED, TESTED, OTHERS = (
    ((8, 8), (8, 5), (8, 12)),
    ((8, 8), (8, 14)),
    ((1, 1), (1, 7), (3, 20)),
)
FULL = (8, POSITIONS)


def texts(count: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count + length)
    return {"input_ids": torch.randint(0, VOCABULARY, (count, length), generator=generator)}


def logits(output: Any) -> Tensor:
    found: Tensor = pytree.tree_leaves(output)[0]
    return found


@dataclass(frozen=True)
class Case:
    """A calibrated model, what makes a batch of it, and its results' folder."""

    model: nn.Module
    batch: Any
    result: quantizer.Result
    folder: Path

    def expected(self, count: int, length: int) -> Tensor:
        """What test mode gives."""
        with torch.no_grad():
            return logits(self.result.network(**self.batch(count, length)))


@pytest.fixture(scope="module", params=["llama", "encoder"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The encoder's first batch has as many tokens as there are positions, the others fewer."""
    is_llama, folder = request.param == "llama", tmp_path_factory.mktemp(request.param)
    model, batch = (
        (llama(use_cache=False), texts) if is_llama else (Encoder().eval(), sentences)
    )
    data = [batch(*size) for size in (CALIBRATED if is_llama else (FULL, *CALIBRATED))]
    result = quantizer.calibrate(model, str(ROOT / "configs" / "cpu_int8.json"), data)
    result.save(folder)
    return Case(model, batch, result, folder)


def test_test_mode_takes_other_lengths(case: Case) -> None:
    data = [case.batch(*size) for size in TESTED]
    compared = case.result.test(data)
    assert compared.metrics["sqnr_db"] > 15
    assert quantizer.load(case.folder, case.model, data).test().metrics == compared.metrics
    backwards = quantizer.load(case.folder, case.model, data[::-1]).test().metrics
    assert backwards["sqnr_db"] == pytest.approx(compared.metrics["sqnr_db"]), (
        "traced on another length"
    )


def test_generated_code_equals_test_mode_at_any_length(case: Case) -> None:
    (path,) = case.folder.glob("*.py")
    network = imported(path)
    for size in OTHERS:
        with torch.no_grad():
            assert torch.equal(logits(network(**case.batch(*size))), case.expected(*size))


@pytest.mark.parametrize("case", ["llama", *extended("encoder")], indirect=True)
def test_an_onnx_file_takes_any_length_in_a_default_session(case: Case, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    case.result.export("onnx", tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    assert {tuple(given.shape) for given in session.get_inputs()} == {("batch", "sequence")}
    for size in OTHERS:
        feed = {name: tensor.numpy() for name, tensor in case.batch(*size).items()}
        found, expected = torch.from_numpy(session.run(None, feed)[0]), case.expected(*size)
        assert float((found == expected).float().mean()) >= 0.999


@pytest.mark.parametrize("case", ["encoder"], indirect=True)
def test_a_program_takes_any_length(case: Case, tmp_path: Path) -> None:
    case.result.export("pt2", tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in OTHERS:
        with torch.no_grad():
            found, expected = logits(program(**case.batch(*size))), case.expected(*size)
        assert float((found == expected).float().mean()) >= 0.99


@pytest.mark.parametrize("case", ["encoder"], indirect=True)
def test_an_encoder_says_how_many_positions_it_has(case: Case) -> None:
    with pytest.raises(
        DataError,
        match=f"the model takes sequences of 1 to {POSITIONS}, got one of {POSITIONS + 1}",
    ):
        case.expected(2, POSITIONS + 1)


ALGORITHMS = ["gptq", "awq", "smooth"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_learn_from_texts_of_several_lengths(name: str) -> None:
    weight = {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 16}
    read = {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True}
    config = {
        "global_quant_config": {"weight": weight, "input_tensors": read},
        "algo_config": {"name": name},
    }
    result = quantizer.calibrate(
        llama(use_cache=False), config, [texts(*size) for size in CALIBRATED]
    )
    assert result.test([texts(*size) for size in TESTED]).metrics["sqnr_db"] > 15


def positions() -> dict[str, Any]:
    spec = {
        "dtype": "int8",
        "observer_cls": "PerChannelMinMaxObserver",
        "qscheme": "per_channel",
        "ch_axis": 1,
    }
    layers = {"lm_head": {"input_tensors": {**spec, "is_dynamic": False}}}
    return {"global_quant_config": {}, "layer_quant_config": layers}


def test_a_scale_for_each_position_fixes_the_length(tmp_path: Path) -> None:
    model = llama(use_cache=False)
    result = quantizer.calibrate(model, positions(), [texts(2, 8), texts(3, 8)])
    result.save(tmp_path)
    with pytest.raises(
        DataError, match=r"batch 1: .*input_0: expected \[b, 8\] torch.int64, got \[2, 14\]"
    ):
        result.test([texts(2, 8), texts(2, 14)])
    with pytest.raises(ResultError, match="has 14 channels"):
        quantizer.load(tmp_path, model, [texts(2, 14)])
    with pytest.raises(
        DataError, match=r"batch 1: input of .*this batch has 5 of them where others have 8"
    ):
        quantizer.calibrate(model, positions(), [texts(2, 8), texts(3, 5)])


class Sizes(nn.Module):
    """Arithmetic with the count of tokens, by the functions of Python that torch traces of
    sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x, size = self.linear(self.embedding(tokens)), tokens.shape[1]
        ends = (
            math.ceil(size / 3),
            math.floor(size * 0.4),
            math.trunc(size * 0.6),
            round(size * 0.7),
            int(size**0.5),
        )
        return (
            *(x[:, :end].sum(1) for end in ends),
            x[:, : max(size // 2, 3)].sum(1),
            x[:, : min(size, 20)].sum(1),
        )


class Chunks(nn.Module):
    """Fills up to chunks of four, so that torch cannot prove that one token, of which its trace
    would differ, works.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        size = tokens.shape[1]
        x = F.pad(self.linear(self.embedding(tokens)), (0, 0, 0, -size % 4))[:, 1:]
        return x[:, : size - 1]  # type: ignore[no-any-return]


def test_arithmetic_with_sizes_runs_and_a_file_that_cannot_hold_it_is_refused(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, data = Sizes().eval(), [(texts(8, length)["input_ids"],) for length in (12, 9, 17)]
    result = quantizer.calibrate(model, str(ROOT / "configs" / "cpu_int8.json"), data)
    assert result.test([(texts(8, 14)["input_ids"],)]).metrics["sqnr_db"] > 30
    with pytest.raises(
        ModelError,
        match="this network cannot be saved by torch: SerializeError: Failed serializing",
    ):
        result.export("pt2", tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()


def test_a_program_runs_lengths_that_torch_cannot_prove(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [(texts(8, length)["input_ids"],) for length in (12, 9, 17)]
    result = quantizer.calibrate(
        Chunks().eval(), str(ROOT / "configs" / "weight_int8.json"), data
    )
    assert result.export("pt2", tmp_path / "net.pt2").equal == 1
    program = torch.export.load(tmp_path / "net.pt2").module()
    (tokens,) = texts(3, 20).values()
    with torch.no_grad():
        assert torch.equal(program(tokens), result.network(tokens))
