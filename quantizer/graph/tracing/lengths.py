"""The sequence lengths of a call: which axes of its inputs may have one, and which of them a
trace leaves open.

Floating-point inputs such as images and features keep their sizes unless `--dynamic` names
them, because most models depend on these in their weights. Masks, positions and embeddings that
are as long as the tokens of the same call are the exceptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.config.run_options import AXES

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_MIN_TRACED_LENGTH = 2
"""The shortest length that torch can leave open: it takes a size of one for a constant."""
_UNBOUNDED = 1 << 31
_MAX_FLOAT_RANK = 3
"""Axes of a floating-point input that may have a length; with more it is an image."""


@dataclass(frozen=True)
class Length:
    """A size, other than the batch's, that each call may choose.

    Args:
        name: "sequence", that of a second one "sequence_1"; or "height", "width", "length".
        axes: where it is, as (input's index among the call's leaves, axis).
        traced: what it was in the trace.
        least: the shortest that the model accepts.
        most: the longest, None if there is no limit.
        step: how far accepted sizes are apart.
    """

    name: str
    axes: tuple[tuple[int, int], ...]
    traced: int
    least: int
    most: int | None = None
    step: int = 1

    @property
    def noun(self) -> str:
        """Return what it is called in sentences.

        >>> Length("width_1", ((1, 3),), 32, 1).noun
        'width'
        """
        noun = self._kind
        return "length" if noun == "sequence" else noun

    @property
    def is_asked_for(self) -> bool:
        """Return whether it is a size of a floating-point input that `--dynamic` names."""
        return self._kind in AXES

    @property
    def _kind(self) -> str:
        kind, _, _ = self.name.partition("_")
        return kind

    def nearest(self, size: int) -> int:
        """Return the largest accepted size up to `size`, else the least one.

        >>> Length("height", ((0, 2),), 32, 8, step=4).nearest(15)
        12
        """
        if self.most is not None:
            size = min(size, self.most)
        size = max(size, self.least)
        beyond = size - self.least
        return size - beyond % self.step

    def __contains__(self, size: int) -> bool:
        if size < self.least:
            return False
        beyond = size - self.least
        if beyond % self.step:
            return False
        return self.most is None or size <= self.most

    def __str__(self) -> str:
        text = f"{self.least} or more"
        if self.most is not None:
            text = f"{self.least} to {self.most}"
        if self.step > 1:
            text += f" in steps of {self.step}"
        return text


def length_axes(call: Any) -> list[tuple[int, ...]]:
    """Return for each leaf of a call the axes that may have a length.

    These are the second axis of tokens, and all axes of other leaves that have the same size.
    """
    leaves = pytree.tree_leaves(call)
    sizes = {leaf.shape[1] for leaf in leaves if _is_tokens(leaf)}
    axes: list[tuple[int, ...]] = []
    for leaf in leaves:
        shape = leaf.shape if _may_have_length(leaf) else ()
        axes.append(tuple(axis for axis in range(1, len(shape)) if shape[axis] in sizes))
    return axes


def _is_tokens(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.is_floating_point():
        return False
    return leaf.dim() == 2 and leaf.shape[1] >= _MIN_TRACED_LENGTH


def _may_have_length(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return False
    return leaf.dim() <= _MAX_FLOAT_RANK or not leaf.is_floating_point()


def size_axes(call: Any, names: Collection[str]) -> list[tuple[int, ...]]:
    """Return for each leaf of a call the axes that have one of the sizes in `AXES`."""
    axes: list[tuple[int, ...]] = []
    for leaf in pytree.tree_leaves(call):
        of_leaf: list[int] = []
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        for name in names:
            rank, axis = AXES[name]
            if is_float and leaf.dim() == rank:
                of_leaf.append(axis)
        axes.append(tuple(of_leaf))
    return axes


def shortened_lengths(call: Any) -> Any | None:
    """Return the call with all lengths reduced by one, None if there are none or one of them is
    too short for that.
    """
    leaves, structure = pytree.tree_flatten(call)
    is_shorter = False
    for index, axes in enumerate(length_axes(call)):
        for axis in axes:
            size = leaves[index].shape[axis] - 1
            if size < _MIN_TRACED_LENGTH:
                return None
            leaves[index] = leaves[index].narrow(axis, 0, size).clone()
            is_shorter = True
    return pytree.tree_unflatten(leaves, structure) if is_shorter else None


def open_lengths(program: ExportedProgram) -> dict[Any, Length]:
    """Return the lengths that a trace has left open, by torch's symbol."""
    lengths: dict[Any, Length] = {}
    for symbol, axes in axes_of_symbols(program).items():
        name = f"sequence_{len(lengths)}" if lengths else "sequence"
        traced = _traced_size(program, axes[0])
        least, most = _range(program.range_constraints.get(symbol))
        # Otherwise the model reads each column on its own, as many as the example has
        if least < traced:
            lengths[symbol] = Length(name, tuple(axes), traced, least, most)
    return lengths


def excludes_single_batches(program: ExportedProgram, axes: Sequence[int | None]) -> bool:
    """Return whether a trace is valid for all batch sizes except single ones.

    A model that compares its batch with a cached size excludes that size.

    Args:
        program: what was traced.
        axes: by input the axis that counts the samples; None without.
    """
    batches: list[Any] = []
    for value, axis in zip(_inputs(program), axes, strict=True):
        if axis is not None:
            batches.append(value.shape[axis])
    for batch in batches:
        if not _is_symbol(batch):
            return False
        if _range(program.range_constraints[batch.node.expr]) != (1, None):
            return False
    guards = batches[0].node.shape_env.guards
    return all(_excludes_one(guard.expr) for guard in guards)


def _excludes_one(guard: Any) -> bool:
    """Return whether a condition on a size is false for one size alone, as `4 * size != 8`
    is.
    """
    if getattr(guard, "rel_op", "") != "!=":
        return False
    difference = (guard.lhs - guard.rhs).as_poly()
    if difference is None or not difference.is_linear:
        return False
    return all(generator.is_Symbol for generator in difference.gens)


def symbol_sizes(program: ExportedProgram, shapes: Sequence[Sequence[int]]) -> dict[Any, int]:
    """Return the values of torch's symbols, without the batch's, in a call whose leaves have
    these shapes.
    """
    sizes: dict[Any, int] = {}
    for symbol, axes in axes_of_symbols(program).items():
        leaf, axis = axes[0]
        sizes[symbol] = shapes[leaf][axis]
    return sizes


def axes_of_symbols(program: ExportedProgram) -> dict[Any, list[tuple[int, int]]]:
    """Return where each symbol for a size of an input is, as (leaf, axis); the batch is not
    among them.

    The batch is in axis 0 of an input. Without tokens, it may be in axis 1 of all inputs.
    """
    axes: dict[Any, list[tuple[int, int]]] = {}
    batches: set[Any] = set()
    behind_time: set[Any] = set()
    inputs = list(_inputs(program))
    for leaf, value in enumerate(inputs):
        shape: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
        for axis, size in enumerate(shape):
            if not _is_symbol(size):
                continue
            axes.setdefault(size.node.expr, []).append((leaf, axis))
            if axis == 0:
                batches.add(size.node.expr)
            elif axis == 1:
                behind_time.add(size.node.expr)
    if not batches and not any(_is_tokens(value) for value in inputs):
        batches = behind_time
    for symbol in batches:
        del axes[symbol]
    return axes


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def _traced_size(program: ExportedProgram, place: tuple[int, int]) -> int:
    leaf, axis = place
    value = list(_inputs(program))[leaf]
    return int(value.shape[axis].node.hint)


def _inputs(program: ExportedProgram) -> Iterator[Any]:
    """Yield what torch knows of each leaf of a call."""
    specs = program.graph_signature.input_specs
    user_inputs = {spec.arg.name for spec in specs if spec.kind.name == "USER_INPUT"}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in user_inputs:
            yield node.meta.get("val")


def _range(values: Any) -> tuple[int, int | None]:
    """Return the bounds of a symbol, None for an open end.

    What is valid for two tokens is assumed to be valid for one, as for the batch.
    """
    least = 1
    if values.lower.is_Integer and values.lower > _MIN_TRACED_LENGTH:
        least = int(values.lower)
    return least, upper_bound(values)


def upper_bound(values: Any) -> int | None:
    """Return the upper bound of a symbol, None for an open end."""
    if values.upper.is_Integer and values.upper < _UNBOUNDED:
        return int(values.upper)
    return None


def size_in_call(size: Any, lengths: Mapping[Any, int]) -> int | None:
    """Return a size with these lengths inserted, None if it follows the batch."""
    if isinstance(size, int):
        return size
    expression = size.node.expr.subs(dict(lengths))
    return int(expression) if expression.is_number else None


def same_size(one: Any, other: Any) -> bool:
    """Return whether two sizes are the same expression.

    `==` on symbolic sizes would add a guard and fix what is open.
    """
    first, second = _expression(one), _expression(other)
    return bool(first == second)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of a trace have the same sizes, as expressions."""
    if one.dim() != other.dim():
        return False
    return all(map(same_size, one.shape, other.shape))


def leaf_shapes(call: Any) -> list[Sequence[int]]:
    """Return the shapes of the leaves of a call, () for one without a shape."""
    return [getattr(leaf, "shape", ()) for leaf in pytree.tree_leaves(call)]
