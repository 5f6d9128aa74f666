"""The lengths of a call, as a count of tokens: which axes of its inputs may have one, and which
a trace leaves open.

Images, features and other values of floating point keep their sizes, as most models hold these
in their weights. The exceptions are masks, positions and embeddings that are as long as the
tokens beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

LEAST = 2
"""The shortest length that torch traces: it takes a size of one for a constant."""
_UNBOUNDED = 1 << 31
_FLOATS = 3  # axes that values of floating point have at most, so that they are no images


@dataclass(frozen=True)
class Length:
    """A size beside the batch that each call may choose.

    Args:
        name: "sequence", that of a second one "sequence_1".
        axes: where it is, as (input's index among the call's leaves, axis).
        traced: what it was in the trace.
        least: the shortest that the model takes.
        most: the longest, None if there is no end.
    """

    name: str
    axes: tuple[tuple[int, int], ...]
    traced: int
    least: int
    most: int | None = None

    def __contains__(self, size: int) -> bool:
        return self.least <= size and (self.most is None or size <= self.most)

    def __str__(self) -> str:
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"


def length_axes(call: Any) -> list[tuple[int, ...]]:
    """For each leaf of a call the axes that may have a length: the second of tokens, and axes
    of that size.
    """
    leaves = pytree.tree_leaves(call)
    sizes = {leaf.shape[1] for leaf in leaves if isinstance(leaf, Tensor) and _are_tokens(leaf)}
    return [
        tuple(axis for axis in range(1, leaf.dim()) if leaf.shape[axis] in sizes)
        if _may_follow(leaf)
        else ()
        for leaf in leaves
    ]


def _are_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] >= LEAST


def _may_follow(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.dim() <= _FLOATS or not leaf.is_floating_point())


def shortened(call: Any) -> Any | None:
    """The call with lengths of one less; None if there is none, or one is as short as can
    be.
    """
    leaves, structure = pytree.tree_flatten(call)
    axes = length_axes(call)
    sizes = [leaf.shape[axis] for leaf, own in zip(leaves, axes, strict=True) for axis in own]
    if min(sizes, default=0) <= LEAST:
        return None
    for index, own in enumerate(axes):
        for axis in own:
            leaves[index] = leaves[index].narrow(axis, 0, leaves[index].shape[axis] - 1).clone()
    return pytree.tree_unflatten(leaves, structure)


def open_lengths(program: ExportedProgram) -> dict[Any, Length]:
    """The lengths that a trace has left open, by torch's symbol."""
    lengths: dict[Any, Length] = {}
    for symbol, (traced, axes) in _symbols(program).items():
        name = f"sequence_{len(lengths)}" if lengths else "sequence"
        least, most = _range(program.range_constraints.get(symbol))
        if least < traced:  # else the model reads as many columns as there are, each for itself
            lengths[symbol] = Length(name, axes, traced, least, most)
    return lengths


def excludes_single_batches(program: ExportedProgram) -> bool:
    """Whether a trace holds for batches of all sizes but for single ones that it compares them
    with.
    """
    batches: list[Any] = [
        value.shape[0]
        for value in _inputs(program)
        if isinstance(value, Tensor) and value.dim()
    ]
    if not all(isinstance(size, torch.SymInt) and size.node.expr.is_Symbol for size in batches):
        return False
    ranges = (_range(program.range_constraints[size.node.expr]) for size in batches)
    guards = (guard.expr for guard in batches[0].node.shape_env.guards)
    return all(each == (1, None) for each in ranges) and all(map(_excludes_one, guards))


def _excludes_one(guard: Any) -> bool:
    """Whether a condition on a size is false for one size alone, as `4 * size != 8` is."""
    compared = (
        (guard.lhs - guard.rhs).as_poly() if getattr(guard, "rel_op", "") == "!=" else None
    )
    return (
        compared is not None
        and compared.is_linear
        and all(each.is_Symbol for each in compared.gens)
    )


def sizes_of(program: ExportedProgram, shapes: Sequence[Sequence[int]]) -> dict[Any, int]:
    """What torch's symbols are in a call whose leaves have these shapes; the batch is not among
    them.
    """
    return {
        symbol: shapes[axes[0][0]][axes[0][1]]
        for symbol, (_, axes) in _symbols(program).items()
    }


def _symbols(program: ExportedProgram) -> dict[Any, tuple[int, tuple[tuple[int, int], ...]]]:
    """Each symbol for a size of an input, but for the batch: its size in the trace, and where
    it is.
    """
    found: dict[Any, tuple[int, tuple[tuple[int, int], ...]]] = {}
    for index, value in enumerate(_inputs(program)):
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if axis and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                known = found.get(size.node.expr, (0, ()))[1]
                found[size.node.expr] = int(size.node.hint), (*known, (index, axis))
    return found


def _inputs(program: ExportedProgram) -> list[Any]:
    """What torch knows of each leaf of a call."""
    specs = program.graph_signature.input_specs
    user = {spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT}
    return [
        node.meta.get("val")
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in user
    ]


def _range(values: Any) -> tuple[int, int | None]:
    """From least to most. What holds for two tokens is taken to hold for one, as for the
    batch.
    """
    least, most = (
        int(bound) if bound.is_Integer else None for bound in (values.lower, values.upper)
    )
    return (
        1 if least is None or least <= LEAST else least,
        None if most is None or most >= _UNBOUNDED else most,
    )


def size_of(size: Any, lengths: Mapping[Any, int]) -> int | None:
    """A size with these lengths put in; None if it follows the batch."""
    if isinstance(size, int):
        return size
    expression = size.node.expr.subs(dict(lengths))
    return int(expression) if expression.is_number else None


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are one expression; comparing them would fix what is open."""
    first, second = (
        size.node.expr if isinstance(size, torch.SymInt) else size for size in (one, other)
    )
    return bool(first == second)


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a trace have the same sizes, as expressions."""
    return one.dim() == other.dim() and all(map(same_size, one.shape, other.shape))
