"""Rules for how channels go through an operator: the values of the columns `axes` and
`commutes` of the table of operators.

A rule receives a call on labels, numbers of channels that are where the values do. It returns
the labels of what the operator makes. It knows one call, and no graph.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Commutes(enum.Flag):
    """Changes of the channels of an operator's input that have the same effect on its output.

    SCALING multiplies each channel by a factor above zero, SHIFTS adds a constant to each,
    ROTATIONS multiplies all of an axis by a matrix.
    """

    NOTHING = 0
    SCALING = enum.auto()
    SHIFTS = enum.auto()
    ROTATIONS = enum.auto()
    AFFINE = SCALING | SHIFTS
    LINEAR = SCALING | ROTATIONS
    ALL = SCALING | SHIFTS | ROTATIONS


@dataclass(frozen=True)
class LabelledCall:
    """One call of an operator on labels.

    Args:
        labels: arguments that other nodes make, nested as in the call; None instead of one
            without labels.
        arguments: all arguments, with tensors without memory for what other nodes make.
        shape: of what the operator makes, of the first of several results.
        run: runs the operator itself on the labels.
    """

    labels: Mapping[str, Any]
    arguments: Mapping[str, Any]
    shape: torch.Size
    run: Callable[[], Any]

    @property
    def first(self) -> Tensor:
        """Return the labels of the first argument."""
        labels: Tensor = next(iter(self.labels.values()))
        return labels


@dataclass(frozen=True)
class AxisRule:
    """Where the channels of some arguments are in the result.

    Args:
        labels: returns the labels of the result (of each, if there are several), None where
            channels are mixed.
        arguments: those that bring channels, the first one if none is named. At least one of
            them has labels.
        runs: whether the operator itself is run on labels.
    """

    labels: Callable[[LabelledCall], Any]
    arguments: tuple[str, ...] = ()
    runs: bool = True


def changes(labels: Tensor, axis: int) -> bool:
    """Return whether labels differ along an axis, after `labels.compress_labels`."""
    return labels.shape[axis] > 1 and labels.stride(axis) != 0


def pads_zeros(attrs: Mapping[str, Any]) -> bool:
    """Return whether a padding is of zeros, or of the tensor's own values."""
    return attrs.get("mode", "constant") != "constant" or not attrs.get("value")


def is_padded(attrs: Mapping[str, Any]) -> bool:
    """Return whether the windows of a convolution or a pooling reach into padding."""
    padding = attrs.get("padding", 0)
    if isinstance(padding, (list, tuple)):
        return any(padding)
    return padding != "valid" and bool(padding)


def over_last(dims: int | None = None) -> AxisRule:
    """Return the rule of pooling and resizing, which mix the last axes alone.

    Args:
        dims: how many axes they mix; all but two if it is None.
    """

    def rule(call: LabelledCall) -> Tensor | None:
        """Return the labels of the output, mixed over the last axes."""
        count = dims or len(call.shape) - 2
        return _over(call.first, range(-count, 0), call.shape)

    return AxisRule(rule, runs=False)


def _over(labels: Tensor | None, axes: Iterable[int], shape: torch.Size) -> Tensor | None:
    """Return the labels of a value of another size along axes along which they do not
    change.
    """
    if labels is None:
        return None
    for axis in axes:
        if changes(labels, axis):
            return None
        labels = labels.narrow(axis, 0, 1)
    return labels.expand(shape)


def _run_beside(call: LabelledCall, axes: Iterable[int]) -> Any:
    """Run the operator unless labels change along axes on which values decide."""
    return None if any(changes(call.first, axis) for axis in axes) else call.run()


def _indexed(call: LabelledCall) -> Any:
    axes: list[int] = []
    for axis, index in enumerate(call.arguments["indices"]):
        if index is not None:
            axes.append(axis)
    return _run_beside(call, axes)


def _padded(call: LabelledCall) -> Any:
    dims = len(call.arguments["pad"]) // 2
    if not pads_zeros(call.arguments):
        return None
    return _over(call.first, range(-dims, 0), call.shape)


def _reduced(call: LabelledCall) -> Any:
    labels = call.first
    dims = call.arguments.get("dim")
    axes = [dims] if isinstance(dims, int) else list(dims or range(labels.dim()))
    if any(changes(labels, axis) for axis in axes):
        return None
    keepdim = bool(call.arguments.get("keepdim"))
    return labels.amax(axes, keepdim=keepdim)


def _alike(call: LabelledCall) -> Any:
    """Return the labels if both operands have the same channels in the same places."""
    one = call.labels.get("input")
    other = call.labels.get("other")
    if one is None or other is None:
        return None
    one = one.expand(call.shape)
    return one if torch.equal(one, other.expand(call.shape)) else None


def _product(call: LabelledCall) -> Any:
    """Return the labels of the only factor that has some.

    The other one may be anything that does not depend on them.
    """
    factors = [call.labels.get("input"), call.labels.get("other")]
    labelled = [labels for labels in factors if labels is not None]
    if len(labelled) != 1 or call.arguments.get("rounding_mode"):
        return None
    return labelled[0].expand(call.shape)


def _attention(call: LabelledCall) -> Any:
    """Return the labels of a mean of the values, which several heads of queries may share."""
    labels = call.labels["value"]
    if labels.dim() > 2 and labels.shape[-3] != call.shape[-3]:
        repeats = call.shape[-3] // labels.shape[-3]
        labels = labels.repeat_interleave(repeats, -3)
    return _over(labels, [-2], call.shape)


def _matrix_product(call: LabelledCall) -> Any:
    """Return the labels of the only factor that has some, if they do not change along the axis
    of the sum.
    """
    left = call.labels.get("input")
    key = "other" if "other" in call.arguments else "mat2"
    right = call.labels.get(key)
    if left is None:
        return _over(right, [-2], call.shape)
    return _over(left, [-1], call.shape) if right is None else None


def _einsum(call: LabelledCall) -> Any:
    """Return labels as for a product of matrices.

    They repeat along each index of the result that the labelled factor lacks.
    """
    terms, result = call.arguments["equation"].replace(" ", "").split("->")
    factors = zip(terms.split(","), call.labels["tensors"], strict=True)
    labelled = [(term, labels) for term, labels in factors if labels is not None]
    if len(labelled) != 1 or "." in terms:
        return None
    term, labels = labelled[0]
    remaining = ""
    for index in term:
        axis = len(remaining)
        if index in result:
            remaining += index
        elif changes(labels, axis):
            return None
        else:
            labels = labels.select(axis, 0)
    labels = labels.permute([remaining.index(index) for index in result if index in remaining])
    for axis, index in enumerate(result):
        if index not in remaining:
            labels = labels.unsqueeze(axis)
    return labels.expand(call.shape)


SAME = AxisRule(lambda call: call.first)
"""Element by element."""
MOVED = AxisRule(lambda call: call.run())
"""The operator moves labels as it moves values."""
RESHAPED = AxisRule(lambda call: call.first.reshape(call.shape))
"""In row-major order. A view depends on strides, which labels do not share with values."""
JOINED = AxisRule(lambda call: call.run(), ("tensors",))
WRITTEN = AxisRule(lambda call: call.run(), ("input", "src"))
"""The second tensor in a place of the first."""
INDEXED = AxisRule(_indexed)
PICKED = AxisRule(lambda call: _run_beside(call, (call.arguments["dim"],)))
PADDED = AxisRule(_padded, runs=False)
REDUCED = AxisRule(_reduced, runs=False)
ALIKE = AxisRule(_alike, ("input", "other"))
PRODUCT = AxisRule(_product, ("input", "other"))
QUOTIENT = AxisRule(_product, ("input",))
ATTENTION = AxisRule(_attention, ("value",))
MATRIX_PRODUCT = AxisRule(_matrix_product, ("input", "other"))
PLAIN_MATRIX_PRODUCT = AxisRule(_matrix_product, ("input", "mat2"))
EINSUM = AxisRule(_einsum, ("tensors",))
