"""Deployed files carry bias corrections, exactly: codes where the bias is a multiple of its
scale, else floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.deployments import FILES, calibrated, deployment, fitted, outputs_of
from support.extended import extended
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import export
from quantizer.export.safetensors import load
from quantizer.export.targets import EXPORTERS
from quantizer.graph.tracing.trace import trace
from quantizer.storage.files import read_tensors

LAYER = "Linear::Linear/linear"
WEIGHTS, BIAS = QuantizationSpec(bit_width=4), QuantizationSpec(scale_type="poweroftwo")


def needing(target: str) -> None:
    for package in EXPORTERS[target].needs:
        pytest.importorskip(
            package, reason=f"--to {target} needs it (extra: {EXPORTERS[target].extra})"
        )


class Layers(nn.Module):
    """Layers of all kinds that are corrected, with a bias and without, side by side in one
    network.
    """

    def __init__(self) -> None:
        super().__init__()
        convs = (nn.Conv2d(4, 6, 3), nn.Conv2d(4, 8, 3, groups=4, bias=False))
        ups = (nn.ConvTranspose2d(4, 6, 2), nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False))
        self.layers = nn.ModuleList(
            (*convs, *ups, nn.Linear(6, 3), nn.Linear(6, 3, bias=False))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def side_by_side() -> Deployment:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6)
    graph = trace(Layers().eval(), (x,))
    # Scales along the inputs of transposed convolutions need the newer version
    choices = {"encodings_version": "2.0.0"}
    return Deployment(graph, calibrated(graph, (x,), {}), (x,), {}, choices=choices)


FURTHER = ("openvino", "pt2_float")
USUAL = [target for target in FILES if target not in FURTHER]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "given"),
    [
        # Only ONNX adds biases to sums of integers, which depends on the layers around
        ("onnx", lambda: deployment("residual")),
        *((target, side_by_side) for target in USUAL),
        # Written as the .onnx, and by the exporter of "pt2"
        *extended(*((target, side_by_side) for target in FURTHER)),
    ],
    ids=["residual", *USUAL, *FURTHER],
)
def test_a_corrected_network_read_back_equals_test_mode(
    target: str, given: Callable[[], Deployment], tmp_path: Path
) -> None:
    needing(target)
    plain = given()
    draw = torch.Generator().manual_seed(0)
    network = plain.network()
    shifts = {}
    for node in plain.graph.nodes:
        if node.row.weight and node.row.kind == "mac":
            layer = network.layers[node.name]
            channels = layer.out_features if node.op == "linear" else layer.out_channels
            shifts[node.name] = torch.randn(int(channels), generator=draw)  # type: ignore[arg-type]
    corrected = replace(plain, solution=replace(plain.solution, corrections=shifts))
    assert not any(
        torch.equal(a, b) for a, b in zip(outputs_of(corrected), outputs_of(plain), strict=True)
    )
    found = export(target, corrected, tmp_path / "net")
    if target == "openvino":
        # Its kernels for some processors add the last bits of floats in another order
        assert found.max_difference < 1e-6
    else:
        assert (found.max_difference, found.equal) == (0.0, 1.0)


def linear(correction: torch.Tensor) -> Deployment:
    """A layer with an 8-bit bias, corrected."""
    torch.manual_seed(0)
    module, x = nn.Linear(6, 4), torch.randn(2, 6)
    tensors = {
        (LAYER, "weights"): fitted(module.weight.detach(), WEIGHTS),
        (LAYER, "bias"): fitted(module.bias.detach(), BIAS),
    }
    return Deployment(
        trace(module, (x,)), Solution(tensors, corrections={LAYER: correction}), (x,), {}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "correction", [0.0, 0.3], ids=["a multiple of the scale", "between its steps"]
)
def test_onnx_holds_the_values_of_a_bias(correction: float, tmp_path: Path) -> None:
    """Not its codes: ONNX Runtime reads those of a convolution as if their scale were that of
    its sums.
    """
    onnx = pytest.importorskip("onnx")
    needing("onnx")
    given = linear(torch.full([4], correction))
    export("onnx", given, tmp_path / "net.onnx")
    expected = given.network().layers[LAYER].get_parameter("bias")
    tensors = onnx.load(tmp_path / "net.onnx").graph.initializer
    (found,) = [
        -torch.frombuffer(bytearray(t.raw_data), dtype=torch.float32)
        for t in tensors
        if "bias" in t.name
    ]
    assert torch.equal(found, expected)


def test_safetensors_holds_codes_and_the_correction_beside_them(tmp_path: Path) -> None:
    correction = torch.tensor([0.001, -0.002, 0.0, 0.5])
    given = linear(correction)
    export("safetensors", given, tmp_path / "net")
    stored = read_tensors(tmp_path / "net")
    assert stored[f"{LAYER}.bias"].dtype == torch.int8
    assert torch.equal(stored[f"{LAYER}.bias_correction"], correction)
    parameters = load(tmp_path / "net")
    assert set(parameters) == {f"{LAYER}.weight", f"{LAYER}.bias"}
    assert torch.equal(
        parameters[f"{LAYER}.bias"], given.network().layers[LAYER].get_parameter("bias")
    )
