"""A result folder holds quantized parameters as codes, and they give test mode's values back
without rounding again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.generated import imported
from support.hierarchies import hierarchy
from support.toys import built, leaves_equal, traced
from torch import Tensor

from quantizer.calibration import fingerprint, observing
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import Solution, encode_parameters, quantized_network
from quantizer.graph.passes import run_passes
from quantizer.nn import quantizer as tensor_quantizer
from quantizer.plan.resolve import resolve_plan
from quantizer.results.folder import read_info
from quantizer.results.write import write_results

FC, CONV = "Residual::Residual/Linear[fc]/linear", "Residual::Residual/Conv2d[conv1]/conv2d"
INT4 = {"bit_width": 4, "qscheme": "per_channel"}


def calibrated(weights: dict[str, Any], **more: Any) -> tuple[Calibration, Solution]:
    """The residual toy with its weights quantized, nothing else."""
    config = hierarchy({"weights": weights}, **more)
    calibration = observing.create_observers(
        resolve_plan(
            config, run_passes(traced("residual"), config.settings), traced("residual")
        )
    )
    return calibration, observing.observed_solution(calibration)


def written(folder: Path, calibration: Calibration, found: Solution) -> Solution:
    """The solution as it is read back."""
    write_results(
        folder,
        traced("residual"),
        calibration,
        found,
        config=hierarchy({}),
        run=fingerprint.model_digests(traced("residual")),
    )
    return read_info(folder).solution


def weights_of(calibration: Calibration, found: Solution) -> dict[str, Tensor]:
    return {
        name: layer.get_parameter("weight")
        for name, layer in quantized_network(calibration.plan.graph, found).layers.items()
        if (name, "weights") in found.tensors
    }


@pytest.mark.parametrize(
    "weights", [INT4, {**INT4, "round_mode": "floor"}, {"dtype": "fp4"}], ids=str
)
def test_weights_are_an_eighth_of_float32_and_come_back_exactly(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    """Codes times their scale, rounded down once more, would be the code below where the
    product is a bit too small.
    """
    calibration, found = calibrated(weights, exclude=("conv1",))
    read = written(tmp_path, calibration, found)
    stored, graph = load_file(tmp_path / "weights.safetensors"), calibration.plan.graph
    for node in (graph.by_name[name] for name in (FC, CONV)):
        tensor = stored[f"module_{graph.nodes.index(node)}.weight"]
        values = graph.tensors[node.params["weight"]]
        if node.name == FC:
            assert (tensor.dtype, tensor.numel()) == (torch.uint8, -(-values.numel() // 2))
        else:
            assert torch.equal(tensor, values)  # it is not quantized
    before, after = weights_of(calibration, found), weights_of(calibration, read)
    assert leaves_equal(after, before)
    generated, call = imported(tmp_path / "Residual.py"), built("residual").call(2)
    with torch.no_grad():
        assert leaves_equal(generated(*call[0]), quantized_network(graph, read)(*call[0]))


def test_what_is_read_rounds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration, found = calibrated(INT4)
    read = written(tmp_path, calibration, found)
    expected = weights_of(calibration, found)
    monkeypatch.setattr(
        "quantizer.nn.quantizer.quantize_tensor", lambda *_, **__: pytest.fail("rounded")
    )
    assert leaves_equal(weights_of(calibration, read), expected)
    assert imported(tmp_path / "Residual.py")


def test_replaced_weights_are_stored_as_codes_alone(tmp_path: Path) -> None:
    calibration, found = calibrated(INT4, exclude=("conv1",))
    weight, floats = torch.linspace(-1, 1, 20).view(5, 4), torch.full((4, 3, 3, 3), 0.3)
    changed = found.with_weights({FC: {"weight": weight}, CONV: {"weight": floats}})
    changed = replace(changed, rescaled={FC: {"weight": weight}})
    read = written(tmp_path, calibration, changed)
    assert {name: list(own) for name, own in read.weights.items()} == {CONV: ["weight"]}
    assert torch.equal(read.weights[CONV]["weight"], floats)
    # The float network is compared with them as they were
    assert torch.equal(read.rescaled[FC]["weight"], weight)
    assert leaves_equal(weights_of(calibration, read), weights_of(calibration, changed))


def test_what_has_no_exact_codes_stays_float_and_is_rounded_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration, found = calibrated(INT4)
    monkeypatch.setattr(tensor_quantizer, "encode", lambda *_: None)
    read = written(tmp_path, calibration, found)
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "weights.safetensors").values()
    } == {torch.float32}
    assert leaves_equal(weights_of(calibration, read), weights_of(calibration, found))
    assert imported(tmp_path / "Residual.py")


def test_other_scales_have_no_codes_yet() -> None:
    calibration, found = calibrated(INT4)
    coded = encode_parameters(calibration.plan.graph, found)
    assert all(tensor.codes is not None for tensor in coded.tensors.values())
    again = coded.with_qparams({FC: calibration.observers[FC, "weights"].qparams()})
    assert again.tensors[FC, "weights"].codes is None
