"""Values that stand for "none", of either sign: quantized networks keep the others, and tables
do not praise them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extended import extended, extended_except
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer import ModelQuantizer
from quantizer.graph.tracing.trace import trace
from quantizer.plan.floating import MASK
from quantizer.plan.groups import layout

LAYERED = ROOT / "configs" / "cpu_int8.json"
INT8: dict[str, Any] = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False}
UINT8 = INT8 | {"dtype": "uint8", "symmetric": False}
HIERARCHICAL = {
    "global_quant_config": {
        "weight": INT8 | {"qscheme": "per_channel"},
        "input_tensors": UINT8,
        "output_tensors": UINT8,
    }
}
INF, LARGEST = math.inf, torch.finfo(torch.float32).max
PLACES = torch.rand(1, 64, 4, generator=torch.Generator().manual_seed(3))
VALID = ((PLACES > 0.05) & (PLACES < 0.95)).all(-1, keepdim=True)


def anchors(outside: float) -> Tensor:
    """Where boxes begin, but a mask constant outside of the image."""
    return torch.where(VALID, torch.logit(PLACES), torch.tensor(outside))


class Boxes(nn.Module):
    """Tokens of an image, what is predicted for each, and `body`, which says what becomes of
    it.
    """

    def __init__(
        self, body: Callable[[Any, Tensor, Tensor], Any], outside: float = LARGEST
    ) -> None:
        super().__init__()
        self.body, self.stem, self.head = body, nn.Conv2d(3, 8, 3, 4, 1), nn.Linear(8, 4)
        self.score, self.last = nn.Linear(8, 1), nn.Linear(4, 3)
        self.register_buffer("anchors", anchors(outside))
        self.register_buffer("valid", VALID)
        self.register_buffer("sides", torch.tensor([640.0, 640.0, 480.0, 480.0]))
        self.trained = nn.Parameter(anchors(1e4), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        tokens = torch.relu(self.stem(x)).flatten(2).transpose(1, 2)
        return self.body(self, self.head(tokens), self.score(tokens))


def assigned(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[:, :5] = value
    return x


def without_first(x: Tensor, value: float = -INF) -> Tensor:
    return torch.scatter(x, -1, torch.zeros(4, 64, 1, dtype=torch.long), value)


def refilled(x: Tensor) -> Tensor:
    return x.clone().scatter_(-1, torch.zeros(4, 64, 1, dtype=torch.long), -INF)


Body = Callable[[Any, Tensor, Tensor], Any]
BODIES: dict[str, Body] = {
    "added": lambda n, y, s: (y + n.anchors).sigmoid(),
    "subtracted": lambda n, y, s: (y - n.anchors).sigmoid(),
    "a trained tensor": lambda n, y, s: (y + n.trained).sigmoid(),
    "scaled": lambda n, y, s: ((y + n.anchors) * 0.5 + 1).tanh(),
    "chosen": lambda n, y, s: torch.where(n.valid, y, LARGEST).sigmoid(),
    "filled in": lambda n, y, s: n.last(y.masked_fill(~n.valid, INF).sigmoid()),
    "assigned": lambda n, y, s: assigned(y, INF).sigmoid(),
    "scattered": lambda n, y, s: n.last(without_first(y).softmax(-1)),
    "scattered in place": lambda n, y, s: n.last(refilled(y).softmax(-1)),
    "scattered for a minimum": lambda n, y, s: without_first(y, 1e9).amin(-1),
    "joined": lambda n, y, s: torch.cat([y + n.anchors, y - n.anchors], 1).sigmoid(),
    "the best of some": lambda n, y, s: (
        s.squeeze(-1).masked_fill(~n.valid[..., 0], -INF).topk(8).values.sigmoid()
    ),
    "the largest of some": lambda n, y, s: n.last(y.masked_fill(~n.valid, -1e9).amax(1)),
    "the largest and where": lambda n, y, s: n.last(
        y.masked_fill(~n.valid, -INF).max(1).values
    ),
    "the least of some": lambda n, y, s: n.last(torch.where(n.valid, y, 1e9).amin(1)),
    "the logarithm of a mask": lambda n, y, s: (
        y @ y.mT + n.valid[..., 0].float().log()[:, None]
    ).softmax(-1),
    "padding of windows": lambda n, y, s: n.last(
        F.max_pool1d(F.pad(y.mT, (1, 1), value=-INF), 3, 1).mT
    ),
}


def built(body: Body, outside: float = LARGEST) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 32, 32) for _ in range(3)]
    return Boxes(body, outside).eval(), data


USUAL = (
    "added",
    "a trained tensor",
    "chosen",
    "filled in",
    "assigned",
    "scattered in place",
    "joined",
    "the largest and where",
    "the logarithm of a mask",
    "padding of windows",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(BODIES, *USUAL))
def test_values_beside_mask_constants_are_kept(name: str) -> None:
    model, data = built(BODIES[name])
    assert quantizer.calibrate(model, LAYERED, data).test().metrics["sqnr_db"] > 30


@pytest.mark.parametrize("outside", [300.0, 1e4, INF, -1e4, -INF])
@pytest.mark.parametrize("form", ["layered", *extended("hierarchical")])
def test_mask_constants_of_any_size_and_sign(form: str, outside: float) -> None:
    model, data = built(BODIES["added"], outside)
    config = LAYERED if form == "layered" else HIERARCHICAL
    assert quantizer.calibrate(model, config, data).test().metrics["sqnr_db"] > 45


def test_a_layer_in_place_whose_outputs_are_filled_keeps_its_quantizer() -> None:
    """What is filled stands behind the module, so that the module's own output has no
    mask constants.
    """
    model, data = built(lambda n, y, s: y.masked_fill(~n.valid, INF).sigmoid())
    quantized = ModelQuantizer(HIERARCHICAL).quantize_model(copy.deepcopy(model), data)
    assert "activation" in quantized.get_submodule("head").quantizers
    with torch.no_grad():
        expected = model(data[0])
        error = quantized(data[0]) - expected
    assert float(10 * torch.log10(expected.square().sum() / error.square().sum())) > 30


LEGITIMATE: dict[str, Body] = {
    "boxes in pixels": lambda n, y, s: y.sigmoid() * n.sides,
    "boxes in pixels beside scores": lambda n, y, s: torch.cat(
        [y.sigmoid() * n.sides, s.sigmoid()], -1
    ),
    "a far corner": lambda n, y, s: (y + n.sides, s.sigmoid()),
    "a mean that is added again": lambda n, y, s: (y * 50 + n.sides).clamp(0, 255),
    "a mean before a layer": lambda n, y, s: n.last((y - n.sides) / 58),
    "a temperature": lambda n, y, s: (y * n.sides).softmax(-1),
    "a number as temperature": lambda n, y, s: (y @ y.mT * 100).softmax(-1),
    "places that are compared and returned": lambda n, y, s: compared(y + n.sides),
    "a logarithm of places": lambda n, y, s: n.last(
        y + (torch.arange(64.0) + 1).log()[:, None]
    ),
}


def compared(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return boxes, boxes > 320


@pytest.mark.slow
@pytest.mark.parametrize("name", LEGITIMATE)
def test_constants_that_are_large_because_pixels_are_stay_quantized(name: str) -> None:
    model, data = built(LEGITIMATE[name])
    graph = trace(model, (data[0],))
    assert MASK not in layout(graph).floats.values()


@pytest.mark.parametrize(("outside", "most"), [(300.0, 25.0), (1e4, 5.0), (LARGEST, 5.0)])
def test_a_tensor_whose_range_a_mask_constant_sets_never_looks_perfect(
    outside: float, most: float
) -> None:
    """What is returned is quantized by its range, mask constants and all, and the others are what
    the table is about.
    """
    model, data = built(lambda n, y, s: y + n.anchors, outside)
    rows = quantizer.calibrate(model, LAYERED, data).test().layers
    found = {
        row["layer"].rpartition("/")[2]: row for row in rows if row["tensor"] == "activation"
    }
    assert found["add"]["local_sqnr_db"] < most
    assert found["add"]["accumulated_sqnr_db"] < most
    assert found["relu"]["local_sqnr_db"] > 35, "others have their usual figures"


def test_ends_of_what_saturates_are_no_mask_constants() -> None:
    """A sigmoid that is nearly always 0 or 1 has two ends, whose error is what counts."""
    model, data = built(lambda n, y, s: n.last((y * 1000).sigmoid()))
    rows = quantizer.calibrate(model, LAYERED, data).test().layers
    found = {
        row["layer"].rpartition("/")[2]: row for row in rows if row["tensor"] == "activation"
    }
    assert found["sigmoid"]["local_sqnr_db"] > 45
