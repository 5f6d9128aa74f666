"""What each row of the table of operators says of axes and channels is what torch computes, no
more and no less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import Commutes
from quantizer.graph.channels.labels import NONE, carried, moved, numbered_labels
from quantizer.graph.ir import Graph, Node, Ref, references
from quantizer.graph.ops import OPS
from quantizer.graph.targets import call

SHAPE = (2, 3, 4, 6)
X, ROLLED = Ref("x"), Ref("rolled")
"""In an argument: the value that is followed, and the same rolled along its first axis."""
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return 4 * torch.randn(shape or SHAPE, dtype=torch.float64, generator=GENERATOR)


def case(
    overload: str = "default", of: Tensor | None = None, **arguments: Any
) -> tuple[str, Tensor, dict[str, Any]]:
    """A call: its overload, what is followed, and its arguments, the first of them `X` unless
    another one is.
    """
    is_named = X.name in references(arguments)
    return (
        overload,
        random() if of is None else of,
        arguments if is_named else {"input": X, **arguments},
    )


ROWS = torch.tensor([0, 1, 1])
CALLS = {
    "matmul": case(other=random().mT),
    "mm": case(of=random(4, 6), mat2=random(6, 5)),
    "bmm": case(of=random(3, 4, 6), mat2=random(3, 6, 5)),
    "einsum": case(equation="abcd,abed->abce", tensors=[X, random()]),
    "scaled_dot_product_attention": case(query=random(), key=random(), value=X),
    "add": case("Tensor", input=X, other=ROLLED),
    "sub": case("Tensor", input=X, other=ROLLED, alpha=3),
    "maximum": case(input=X, other=ROLLED),
    "minimum": case(input=X, other=ROLLED),
    "mul": case("Tensor", other=random()),
    "div": case("Tensor", other=random()),
    "mean": case("dim", dim=[2], keepdim=True),
    "sum": case("dim_IntList", dim=[2]),
    "amax": case(dim=[2]),
    "amin": case(dim=[2], keepdim=True),
    **{f"{kind}_pool1d": case(of=random(3, 4, 6), kernel_size=[2]) for kind in ("avg", "max")},
    **{f"{kind}_pool2d": case(kernel_size=[2, 2]) for kind in ("avg", "max")},
    **{
        f"{kind}_pool3d": case(of=random(1, *SHAPE), kernel_size=[1, 2, 2])
        for kind in ("avg", "max")
    },
    **{
        f"adaptive_{kind}_pool1d": case(of=random(3, 4, 6), output_size=[2])
        for kind in ("avg", "max")
    },
    **{f"adaptive_{kind}_pool2d": case(output_size=[2, 3]) for kind in ("avg", "max")},
    **{
        f"adaptive_{kind}_pool3d": case(of=random(1, *SHAPE), output_size=[1, 2, 3])
        for kind in ("avg", "max")
    },
    "max_pool2d_with_indices": case(kernel_size=[2, 2]),
    "interpolate": case(output_size=[3, 9], align_corners=False),
    "upsample_nearest": case(of=random(3, 4, 6), output_size=[9]),
    "threshold": case(threshold=0.1, value=2.0),
    "clamp": case(min=-0.5, max=0.5),
    "clamp_min": case(min=-0.5),
    "prelu": case(weight=torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)),
    "cat": case(tensors=[X, random()], dim=2),
    "stack": case(tensors=[random(), X], dim=2),
    **{
        name: case(tensors=[X, random()])
        for name in ("hstack", "vstack", "dstack", "column_stack")
    },
    "slice_scatter": case(src=random(2, 3, 4, 2), dim=3, start=1, end=3),
    "select_scatter": case(input=random(), src=X, of=random(2, 3, 6), dim=2, index=1),
    "diagonal_scatter": case(src=random(3, 6, 2), dim1=0, dim2=2),
    "flatten": case("using_ints", start_dim=1, end_dim=2),
    "unflatten": case("int", dim=3, sizes=[2, 3]),
    "reshape": case(shape=[2, 12, 2, 3]),
    "view_as": case(other=torch.empty(6, 4, 6)),
    "reshape_as": case(other=torch.empty(6, 4, 6)),
    "permute": case(dims=[0, 3, 1, 2]),
    "transpose": case("int", dim0=1, dim1=-1),
    "numpy_T": case(of=random(4, 6)),
    "mH": case(of=random(3, 4, 6)),
    "atleast_2d": case(of=random(4)),
    "atleast_3d": case(of=random(4, 6)),
    "squeeze": case("dim", of=random(3, 1, 4), dim=1),
    "unsqueeze": case(dim=1),
    "to": case("dtype", dtype=torch.float64),
    "slice": case("Tensor", dim=2, start=0, end=3),
    "select": case("int", dim=2, index=1),
    "index": case("Tensor", indices=[None, ROWS]),
    "expand": case(size=[5, *SHAPE]),
    "broadcast_to": case(size=[5, *SHAPE]),
    "repeat": case(repeats=[2, 1, 1, 2]),
    "tile": case(dims=[2, 1, 1, 2]),
    "repeat_interleave": case("self_int", repeats=2, dim=1),
    "chunk": case(chunks=2, dim=1),
    "split": case("Tensor", split_size=2, dim=2),
    **{f"{way}split": case("int", sections=2) for way in ("h", "v", "d")},
    "hsplit": case("int", sections=3),
    "tensor_split": case("sections", sections=2, dim=1),
    "unbind": case("int", dim=1),
    "roll": case(shifts=[1], dims=[1]),
    "pixel_shuffle": case(of=random(2, 12, 2, 3), upscale_factor=2),
    "pixel_unshuffle": case(downscale_factor=2),
    "channel_shuffle": case(groups=3),
    "pad": case(pad=[1, 2]),
    "dropout": case(p=0.5, train=False),
    "gather": case(dim=1, index=torch.arange(144).view(SHAPE) % 3),
    "take_along_dim": case(dim=1, indices=torch.arange(144).view(SHAPE) % 3),
    "index_select": case(dim=1, index=ROWS),
    "flip": case(dims=[1]),
    "rot90": case(dims=[1, 2]),
    "diagonal": case(dim1=0, dim2=2),
    "narrow": case(dim=1, start=1, length=2),
    "movedim": case("int", source=1, destination=3),
    "moveaxis": case("int", source=1, destination=3),
    "swapaxes": case(axis0=1, axis1=2),
    "swapdims": case(dim0=1, dim1=2),
}
"""Calls of operators that need more than one tensor of four axes."""
TABLE = [
    name for name, row in OPS.items() if row.axes is not None and row.aten and name != "getitem"
]


@dataclass(frozen=True)
class Called:
    """A graph of one call: its node, the value `x` that is followed, and the call as a function
    of it.
    """

    graph: Graph
    node: Node
    x: Tensor
    run: Callable[[Tensor], list[Tensor]]

    def channels(self, axis: int) -> list[Tensor]:
        """Labels of each result for those along one axis of x; none where they mix."""
        labels = numbered_labels(self.x.shape, axis)
        made = carried(self.graph, self.node, {X.name: labels, ROLLED.name: labels.roll(1, 0)})
        return [
            each for each in (made if isinstance(made, list) else [made]) if each is not None
        ]

    def changed(self, change: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each result before and after a change of x."""
        return list(zip(self.run(self.x), self.run(change(self.x)), strict=True))


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument, each entry of a list by itself, with values changed."""
    return (
        [replaced(item, change) for item in value] if isinstance(value, list) else change(value)
    )


def called(name: str) -> Called:
    """A call of an operator."""
    overload, x, arguments = CALLS.get(name, case())
    target = f"aten.{OPS[name].aten[0]}.{overload}"
    tensors = {X.name: x, ROLLED.name: x.roll(1, 0)}

    def stored(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[key := f"other_{len(tensors)}"] = value
            return Ref(key)
        return value

    read = {key: replaced(value, stored) for key, value in arguments.items()}

    def run(now: Tensor) -> list[Tensor]:
        values = {**tensors, X.name: now, ROLLED.name: now.roll(1, 0)}
        given = {
            k: replaced(v, lambda v: values[v.name] if isinstance(v, Ref) else v)
            for k, v in read.items()
        }
        made = call(target, given)
        return [made] if isinstance(made, Tensor) else list(made)

    inputs = {key: value for key, value in read.items() if list(references(value))}
    attrs = {key: value for key, value in read.items() if key not in inputs}
    nodes = [Node(key, "constant", "", params={"weight": key}) for key in tensors]
    node = Node("y", name, target, inputs, attrs)
    return Called(Graph("M", (*nodes, node), Ref("y"), tensors), node, x, run)


@pytest.mark.parametrize("name", TABLE)
def test_channels_are_where_the_row_says(name: str) -> None:
    """Another value in one channel changes what has its label, and nothing else."""
    here = called(name)
    assert any(here.channels(axis) for axis in range(here.x.dim()))
    for axis in range(here.x.dim()):
        for channel in range(here.x.shape[axis]):
            pairs = here.changed(
                lambda x, at=(axis, channel): x.index_fill(at[0], torch.tensor([at[1]]), 2.0)
            )
            for (before, after), labels in zip(pairs, here.channels(axis), strict=False):
                assert not ((before != after) & (labels != channel)).any()


def at_channels(labels: Tensor, values: Tensor, neutral: float) -> Tensor:
    """The value of each channel, where it is; `neutral` where there is none."""
    return torch.cat([values, values.new_full((1,), neutral)])[
        torch.where(labels == NONE, len(values), labels).long()
    ]


def along(x: Tensor, axis: int, values: Tensor) -> Tensor:
    return values.view([-1 if at == axis else 1 for at in range(x.dim())])


def scales(here: Called, axis: int, values: Tensor) -> bool:
    found = zip(
        here.changed(lambda x: x * along(x, axis, values)), here.channels(axis), strict=False
    )
    return all(
        torch.allclose(after, before * at_channels(labels, values, 1.0))
        for (before, after), labels in found
    )


def shifts(here: Called, axis: int, values: Tensor) -> bool:
    found = zip(
        here.changed(lambda x: x + along(x, axis, values)), here.channels(axis), strict=False
    )
    return all(
        torch.allclose(after, before + at_channels(labels, values, 0.0))
        for (before, after), labels in found
    )


def turns(here: Called, axis: int, values: Tensor) -> bool:
    """Where the row says so, along the axis that `moved` finds, if it finds one; else along the
    same axis.
    """
    rotates = Commutes.ROTATIONS in here.node.row.commutes
    after = moved(here.graph, here.node, axis) if rotates else axis
    if len(values) == 1 or after is None:
        return True
    turn = torch.linalg.qr(torch.outer(values, values) + torch.diag(values)).Q
    [(before, turned), *_] = here.changed(
        lambda x: (x.movedim(axis, -1) @ turn).movedim(-1, axis)
    )
    if before.dim() <= after or before.shape[after] != len(values):
        return False
    return torch.allclose(turned, (before.movedim(after, -1) @ turn).movedim(-1, after))


@pytest.mark.parametrize("name", TABLE)
def test_an_operator_commutes_with_what_its_row_says(name: str) -> None:
    """And with nothing else: where the row does not say so, one axis at least shows why."""
    here = called(name)
    checks = {Commutes.SCALING: scales, Commutes.SHIFTS: shifts, Commutes.ROTATIONS: turns}
    values = {
        axis: random(here.x.shape[axis]).abs() + 0.5
        for axis in range(here.x.dim())
        if here.channels(axis)
    }
    found = {
        flag
        for flag, holds in checks.items()
        if all(holds(here, axis, each) for axis, each in values.items())
    }
    assert found == {flag for flag in checks if flag in here.node.row.commutes}
