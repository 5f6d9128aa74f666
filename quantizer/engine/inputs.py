"""The inputs a calibrated model was traced with. A trace holds all sizes but the batch's; a run may have others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.config.roles import is_parameter
from quantizer.engine.solution import Solution
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph

Shapes = Sequence[Sequence[int | None] | None]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def input_shapes(graph: Graph) -> list[list[int | None] | None]:
    """The shape of each input, in the order of the call; None for the batch, and for what is no tensor."""
    return [None if node.shape is None else list(node.shape) for node in graph.nodes if node.op == "input"]


def window_length(shapes: Shapes) -> int | None:
    """How many tokens the only input [b, s] had, if there was such a one."""
    only = shapes[0] if len(shapes) == 1 else None
    return only[1] if only is not None and len(only) == 2 else None


def call_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Shapes) -> Call | None:
    """The same call with zeros of other sizes; None if it has not as many inputs."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    if len(leaves) != len(shapes):
        return None
    resized = [_zeros(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
    call: Call = pytree.tree_unflatten(resized, structure)
    return call


def _zeros(value: Any, shape: Sequence[int | None] | None) -> Any:
    if not isinstance(value, Tensor) or shape is None:
        return value
    return value.new_zeros([len(value) if size is None else size for size in shape])


def check_sizes(calibrated: Graph, now: Graph, solution: Solution) -> None:
    """Refuse sizes of inputs that a calibration does not hold for, of one model traced with both.

    Raises:
        ResultError: they change more than sizes, or there is a scale for each of those that differ.
    """
    for why in _differences(calibrated, now, solution):
        shapes = [input_shapes(graph) for graph in (calibrated, now)]
        said, here = (" and ".join(_text(shape) for shape in some if shape is not None) for some in shapes)
        length = window_length(shapes[0])
        remedy = f"give --seq_len {length}, or data of that shape" if length else f"give data of the shape {said}"
        raise ResultError(f"calibrated with inputs of the shape {said}, this run has {here}: then {why}", help=remedy)


def _differences(calibrated: Graph, now: Graph, solution: Solution) -> Iterator[str]:
    before, after = _structure(calibrated), _structure(now)
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            yield f"layer {name} is another"
    for (layer, role), tensor in solution.tensors.items():
        axis, channels, node = tensor.spec.ch_axis, tensor.scale.numel(), now.by_name[layer]
        if not is_parameter(role) and axis is not None and channels > 1:
            is_own = role == "activation" or node.op == "input"
            size = (node if is_own else now.by_name[node.input_roles()[role]]).shape
            if size is not None and size[axis] != channels:
                yield f"{role} of layer {layer} has {size[axis]} channels"


def _structure(graph: Graph) -> dict[str, tuple[Any, ...]]:
    """Per layer what results hold on to: its operator, its parameters, whose values it reads.

    Sizes are free, and so are integers, as they index and are not quantized.
    """
    floats = {node.name: node for node in graph.nodes if node.is_float}
    return {
        name: (node.op, node.target, tuple(node.params.items()), tuple(ref for ref in node.refs() if ref in floats))
        for name, node in floats.items()
    }


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('b' if size is None else str(size) for size in shape)}]"
