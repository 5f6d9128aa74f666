"""Operators that only move values: their values keep their scale, and every file computes what
test mode does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.configs import document
from support.generated import imported
from torch import Tensor, nn

import quantizer
from quantizer.plan.resolve import NO_RULES

pytestmark = pytest.mark.slow

pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")


def assigned(y: Tensor) -> Tensor:
    """Boxes as detectors decode them: in place, part by part."""
    z = y.clone()
    z[:, :2] = y[:, 2:]
    z[:, 3] = 1.0
    z[..., 1:3, 0] = y[..., 1:3, 1]
    return z


def gathered(y: Tensor) -> Tensor:
    """Into memory that nothing has been written to."""
    z = y.new_empty(y.shape)
    z[:] = y.flip(1)
    return torch.empty_like(z).copy_(z)


def broadcast(y: Tensor) -> Tensor:
    """A copy that is larger than what it is of."""
    return torch.zeros_like(y).copy_(y[:, :, :1, :1])


def by_a_grid(y: Tensor) -> Tensor:
    """Both coordinates of each cell."""
    return y + torch.stack(
        torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), 0
    ).sum(0)


def put(y: Tensor) -> Tensor:
    z = y.clone()
    z[:, torch.tensor([0, 2])] = y[:, torch.tensor([1, 3])]
    return z


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "assigned": assigned,
    "gathered": gathered,
    "broadcast": broadcast,
    "by a grid": by_a_grid,
    "grid of values": lambda y: torch.stack(
        torch.meshgrid(y[0, 0, 0], y[0, 1, 0], indexing="ij")
    )[None],
    "broadcast tensors": lambda y: torch.broadcast_tensors(y[:, :1], y)[0],
    "put": put,
    "slice_scatter": lambda y: y.slice_scatter(y[:, 2:], 1, 0, 2),
    "select_scatter": lambda y: y.select_scatter(y[:, 1], 1, 0),
    "diagonal": lambda y: y.diagonal(dim1=2, dim2=3),
    "reshape_as": lambda y: y.flatten(2).reshape_as(y),
    "view_as": lambda y: y.flatten(2).view_as(y),
    "expand_as": lambda y: y[:, :, :1].expand_as(y),
    "broadcast_to": lambda y: y[:, :, :1].broadcast_to(y.shape),
    "unfold": lambda y: y.unfold(3, 2, 2).flatten(3),
    "roll": lambda y: y.roll(1, 2),
    "tile": lambda y: y.tile(1, 1, 2, 1),
    "unbind": lambda y: y.unbind(1)[0],
    "tensor_split": lambda y: torch.cat(y.tensor_split(3, 2)[::-1], 2),
    "hsplit": lambda y: torch.hstack(y.hsplit(2)[::-1]),
    "rot90": lambda y: y.rot90(1, (2, 3)),
    "fliplr": lambda y: y.fliplr(),
    "moveaxis": lambda y: y.moveaxis(2, 3),
    "take_along_dim": lambda y: torch.take_along_dim(y, y.topk(2, 1)[1], 1),
}


class Net(nn.Module):
    """Each move of what a convolution makes, and another one behind it where it takes the
    result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.before(x)
        moved = [move(y) for move in MOVES.values()]
        return [
            self.behind(each) if each.dim() == 4 and each.shape[1] == 4 else each
            for each in moved
        ]


BATCH = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def result() -> quantizer.Result:
    torch.manual_seed(0)
    return quantizer.calibrate(Net().eval(), document(), [BATCH])


def test_none_is_without_a_row(result: quantizer.Result) -> None:
    assert NO_RULES not in {*result.plan.plan.floats.values()}


def test_the_network_and_its_file_compute_what_the_model_does(
    result: quantizer.Result, tmp_path: Path
) -> None:
    result.save(tmp_path)
    with torch.no_grad():
        for ours, theirs in zip(
            imported(tmp_path / "Net.py")(BATCH), result.network(BATCH), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_a_default_session_computes_its_codes(result: quantizer.Result, tmp_path: Path) -> None:
    session = result.export("onnx", tmp_path / "net.onnx").default_session
    assert session is not None
    assert session.first_differing is None
    assert session.sqnr_db is not None and session.sqnr_db > 100
