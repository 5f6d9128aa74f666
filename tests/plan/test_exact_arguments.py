"""Angles, indices and what is rounded: networks that lost nearly all when these had eight
bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended_except
from support.onnx_files import quick_files  # noqa: F401 - a fixture
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer import ModelQuantizer

LAYERED = ROOT / "configs" / "cpu_int8.json"
INT8: dict[str, Any] = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False}
UINT8 = INT8 | {"dtype": "uint8", "symmetric": False}
CHANNELS = INT8 | {"qscheme": "per_channel"}
OUTPUTS = {"global_quant_config": {"weight": CHANNELS, "output_tensors": UINT8}}
SIZE = 16
PLACES = F.affine_grid(torch.eye(2, 3)[None], [1, 1, SIZE, SIZE], align_corners=False)
IDENTITY = torch.tensor([1.0, 0, 0, 0, 1, 0])


class Points(nn.Module):
    """A network of coordinates in [0, 1]; `body` says how they are seen."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], width: int = 64) -> None:
        super().__init__()
        self.body, self.first, self.second = body, nn.Linear(width, 32), nn.Linear(32, 3)
        self.embedding, self.angle = nn.Embedding(256, width), nn.Linear(3, width)
        with torch.no_grad():
            self.angle.weight.mul_(20)
        self.register_buffer("frequencies", 10 * torch.randn(3, 32))
        self.register_buffer("octaves", 2.0 ** torch.arange(6) * math.pi)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.body(self, x))))  # type: ignore[no-any-return]


class Images(nn.Module):
    """A network that reads images at places that it computes."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.features = body, nn.Conv2d(3, 8, 3, padding=1)
        self.flow, self.pose = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(3 * SIZE * SIZE, 6)
        with torch.no_grad():
            self.pose.weight.mul_(0.1)
            self.pose.bias.copy_(IDENTITY)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def waves(angles: Tensor) -> Tensor:
    return torch.cat([angles.sin(), angles.cos()], -1)


def cells(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which cell of a grid each point is in, and where in it."""
    scaled = x * 40
    corner = scaled.floor()
    return (corner.long() * torch.tensor([1, 7, 31])).sum(-1) % 256, (scaled - corner).sum(
        -1, keepdim=True
    )


def warped(net: Images, x: Tensor, shift: Tensor) -> Tensor:
    return F.grid_sample(
        net.features(x), PLACES + 0.3 * shift.permute(0, 2, 3, 1), align_corners=False
    )


def turned(net: Images, x: Tensor) -> Tensor:
    pose = net.pose(x.flatten(1)).view(-1, 2, 3)
    corners = torch.cat([PLACES, torch.ones(1, SIZE, SIZE, 1)], -1).flatten(1, 2)
    places = (corners @ pose.mT).unflatten(1, (SIZE, SIZE))
    return net.features(F.grid_sample(x, places, align_corners=False))  # type: ignore[no-any-return]


POINTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "a product with a buffer": (lambda n, x: waves(2 * math.pi * x @ n.frequencies), 64),
    "octaves beside the input": (
        lambda n, x: torch.cat([x, waves((x[..., None] * n.octaves).flatten(-2))], -1),
        39,
    ),
    "sums": (lambda n, x: waves((x + 0.1) @ n.frequencies - x.sum(-1, keepdim=True)), 64),
    "a joined argument": (
        lambda n, x: torch.cat([x @ n.frequencies, x @ -n.frequencies], -1).sin(),
        64,
    ),
    "complex numbers": (
        lambda n, x: torch.view_as_real(torch.exp(1j * (x @ n.frequencies))).flatten(-2),
        64,
    ),
    "a layer that makes angles": (lambda n, x: n.angle(x).sin(), 64),
    "what remains": (lambda n, x: (x @ n.frequencies).frac(), 32),
    "an index": (lambda n, x: n.embedding((x[:, 0] * 255).long()), 64),
    "cells of a grid": (lambda n, x: n.embedding(cells(x)[0]) * cells(x)[1], 64),
}
IMAGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a flow": lambda n, x: warped(n, x, n.flow(x).tanh()),
    "a pose": turned,
}
CASES = [*POINTS, *IMAGES]


def built(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    if name in IMAGES:
        return Images(IMAGES[name]).eval(), [torch.randn(8, 3, SIZE, SIZE) for _ in range(2)]
    return Points(*POINTS[name]).eval(), [torch.rand(256, 3) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_network_of_arguments_keeps_its_values(name: str) -> None:
    model, data = built(name)
    assert quantizer.calibrate(model, LAYERED, data).test().metrics["sqnr_db"] > 30


@pytest.mark.parametrize("name", ["a layer that makes angles", "a flow"])
def test_the_other_form_and_modules_in_place_leave_the_same_outputs_float(name: str) -> None:
    model, data = built(name)
    traced = quantizer.calibrate(model, OUTPUTS, data)
    quantized = ModelQuantizer(OUTPUTS).quantize_model(copy.deepcopy(model), data)
    outputs = {
        path
        for path, module in quantized.named_modules()
        if "activation" in getattr(module, "quantizers", {})
    }
    assert outputs.isdisjoint({"angle", "flow"})
    assert outputs, "others have quantizers"
    with torch.no_grad():
        difference = quantized(data[0]) - traced.network(data[0])
    assert float(difference.abs().max()) < 1e-5
    assert traced.test().metrics["sqnr_db"] > 30


@pytest.mark.usefixtures("quick_files")
def test_a_file_computes_them_in_float(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
    model, data = built("a product with a buffer")
    result = quantizer.calibrate(model, LAYERED, data)
    assert result.export("onnx", tmp_path / "net.onnx").sqnr_db > 60


def by_linear(net: Any, angles: Tensor) -> Tensor:
    return net.multiplied(angles)  # type: ignore[no-any-return]


def by_moved(net: Any, angles: Tensor) -> Tensor:
    return net.convolved(angles.mT).mT  # type: ignore[no-any-return]


def by_rectified(net: Any, angles: Tensor) -> Tensor:
    return net.multiplied(angles.relu())  # type: ignore[no-any-return]


MADE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a product with a buffer": lambda net, x: x @ net.frequencies,
    "a sum": lambda net, x: x @ net.frequencies + net.phases,
    "a product with a parameter": lambda net, x: x @ net.trained,
    "a layer": lambda net, x: net.angle(x),
    "a layer and its ReLU": lambda net, x: net.angle(x).relu(),
}


class Shared(nn.Module):
    """Angles are read by sines and multiplied by a layer; either reads the same tensor, or one
    that is made again.
    """

    def __init__(
        self, made: str, multiplied: Callable[[Any, Tensor], Tensor], *, is_one: bool
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.multiply, self.is_one = MADE[made], multiplied, is_one
        self.angle, self.first, self.second = (
            nn.Linear(3, 32),
            nn.Linear(64, 32),
            nn.Linear(32, 3),
        )
        self.multiplied, self.convolved = nn.Linear(32, 32), nn.Conv1d(32, 32, 1)
        with torch.no_grad():
            self.angle.weight.mul_(20)
            self.multiplied.weight.mul_(0.1)
            self.convolved.weight.mul_(0.1)
        self.register_buffer("frequencies", 10 * torch.randn(3, 32))
        self.register_buffer("phases", torch.randn(32))
        self.trained = nn.Parameter(10 * torch.randn(3, 32))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.make(self, x)
        again = angles if self.is_one else self.make(self, x)
        features = self.first(waves(angles)) + self.multiply(self, again)
        return self.second(features.relu())  # type: ignore[no-any-return]


def rooms() -> list[Tensor]:
    return [
        torch.rand(4, 16, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]


MULTIPLIED = [by_linear, by_moved, by_rectified]
IN_TURN = [
    (made, multiplied, [LAYERED, OUTPUTS][(row + column) % 2])
    for row, made in enumerate(MADE)
    for column, multiplied in enumerate(MULTIPLIED)
]
"""Each way to make angles with each way to multiply, in the two forms by turns."""


USUAL = [0, 4, 8, 9, 13]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "multiplied", "config"),
    extended_except(IN_TURN, *(IN_TURN[number] for number in USUAL)),
)
def test_an_argument_that_a_layer_multiplies_as_well_stays_exact(
    made: str, multiplied: Callable[[Any, Tensor], Tensor], config: Any
) -> None:
    """The layer quantizes its own input, so that it loses no more than where both are made
    apart.
    """
    found = []
    for is_one in (True, False):
        model = Shared(made, multiplied, is_one=is_one).eval()
        found.append(quantizer.calibrate(model, config, rooms()).test().metrics["sqnr_db"])
    assert found[0] > found[1] - 0.5
    assert found[0] > 30


def test_the_layer_that_multiplies_an_argument_quantizes_it() -> None:
    model = Shared("a layer", by_linear, is_one=True).eval()
    tensors = quantizer.calibrate(model, LAYERED, rooms()).plan.plan.tensors
    names = {layer.partition("[")[2].partition("]")[0]: layer for layer, _ in tensors}
    assert (names["angle"], "activation") not in tensors
    own = tensors[names["multiplied"], "input"]
    assert (own.source, own.spec.bit_width) == (names["angle"], 8)


@pytest.mark.usefixtures("quick_files")
def test_a_file_has_it_quantized_where_it_is_multiplied(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
    result = quantizer.calibrate(
        Shared("a product with a buffer", by_moved, is_one=True).eval(), LAYERED, rooms()
    )
    assert result.export("onnx", tmp_path / "net.onnx").sqnr_db > 60
