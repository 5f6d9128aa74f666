"""How channels go through an operator: what the columns `axes` and `commutes` of the table of
operators may say.

A rule is given a call on labels, numbers of channels that lie where the values do, and gives
the labels of what the operator makes. It knows one call, no graph.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Commutes(enum.Flag):
    """What may be done to the channels that an operator reads, or else to those that it makes:
    the result is the same.

    SCALING multiplies each by a factor above zero, SHIFTS adds a constant to each, ROTATIONS
    turns all of an axis by a matrix.
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
    """One call of an operator, on labels.

    Args:
        labels: arguments that other nodes make, nested as in the call: labels, None for one
            that has none.
        arguments: all arguments; tensors without memory for what other nodes make.
        shape: of what the operator makes, of the first of several results.
        run: the operator itself, on the labels.
    """

    labels: Mapping[str, Any]
    arguments: Mapping[str, Any]
    shape: torch.Size
    run: Callable[[], Any]

    @property
    def first(self) -> Tensor:
        """The labels of the first argument."""
        found: Tensor = next(iter(self.labels.values()))
        return found


@dataclass(frozen=True)
class AxisRule:
    """Where the channels of some arguments are in the result.

    `labels` gives those of the result (of each, where there are several), None where channels
    are mixed. They come by way of `arguments`, the first one if none is named; one of them at
    least has labels. `runs` says whether the operator itself is run on labels.
    """

    labels: Callable[[LabelledCall], Any]
    arguments: tuple[str, ...] = ()
    runs: bool = True


def changes(labels: Tensor, axis: int) -> bool:
    """Whether labels, compressed as `channel_labels` does it, differ along an axis."""
    return labels.shape[axis] > 1 and labels.stride(axis) != 0


def pads_zeros(attrs: Mapping[str, Any]) -> bool:
    """Whether a padding is of zeros, or of the tensor's own values."""
    return attrs.get("mode", "constant") != "constant" or not attrs.get("value")


def is_padded(attrs: Mapping[str, Any]) -> bool:
    """Whether the windows of a convolution or a pooling reach into padding."""
    padding = attrs.get("padding", 0)
    return padding != "valid" and any(
        padding if isinstance(padding, (list, tuple)) else [padding]
    )


def over_last(dims: int | None = None) -> AxisRule:
    """The rule of pooling and resizing: only the last so many axes are mixed; all but two if it
    is None.
    """
    return AxisRule(
        lambda call: _over(call.first, range(-(dims or len(call.shape) - 2), 0), call.shape),
        runs=False,
    )


def _over(labels: Tensor | None, axes: Iterable[int], shape: torch.Size) -> Tensor | None:
    """Labels of a value of another size along axes along which they are alike."""
    axes = tuple(axes)
    if labels is None or any(changes(labels, axis) for axis in axes):
        return None
    for axis in axes:
        labels = labels.narrow(axis, 0, 1)
    return labels.expand(shape)


def _run_beside(call: LabelledCall, axes: Iterable[int]) -> Any:
    """The operator on labels that are alike along axes: what it selects there is not known."""
    return None if any(changes(call.first, axis) for axis in axes) else call.run()


def _padded(call: LabelledCall) -> Any:
    axes = range(-(len(call.arguments["pad"]) // 2), 0)
    return _over(call.first, axes, call.shape) if pads_zeros(call.arguments) else None


def _reduced(call: LabelledCall) -> Any:
    labels, dims = call.first, call.arguments.get("dim")
    axes = [dims] if isinstance(dims, int) else list(dims or range(labels.dim()))
    if any(changes(labels, axis) for axis in axes):
        return None
    return labels.amax(axes, keepdim=bool(call.arguments.get("keepdim")))


def _alike(call: LabelledCall) -> Any:
    """Both operands have the same channels in the same places."""
    one, other = (call.labels.get(key) for key in ("input", "other"))
    if (
        one is None
        or other is None
        or not torch.equal(one.expand(call.shape), other.expand(call.shape))
    ):
        return None
    return one.expand(call.shape)


def _product(call: LabelledCall) -> Any:
    """One factor has labels; the other may be anything that does not depend on them."""
    found = [
        labels for key in ("input", "other") if (labels := call.labels.get(key)) is not None
    ]
    return (
        found[0].expand(call.shape)
        if len(found) == 1 and not call.arguments.get("rounding_mode")
        else None
    )


def _attention(call: LabelledCall) -> Any:
    """A mean of the values; several heads of queries may share one of them."""
    labels = call.labels["value"]
    if labels.dim() > 2 and labels.shape[-3] != call.shape[-3]:
        labels = labels.repeat_interleave(call.shape[-3] // labels.shape[-3], -3)
    return _over(labels, [-2], call.shape)


def _matrix_product(call: LabelledCall) -> Any:
    """One factor has labels, alike along what is summed over."""
    left, right = (
        call.labels.get(key)
        for key in ("input", "other" if "other" in call.arguments else "mat2")
    )
    if left is not None and right is not None:
        return None
    return _over(left, [-1], call.shape) if left is not None else _over(right, [-2], call.shape)


def _einsum(call: LabelledCall) -> Any:
    """As a product of matrices; each index of the result that the labelled factor lacks repeats
    its labels.
    """
    terms, result = call.arguments["equation"].replace(" ", "").split("->")
    factors = zip(terms.split(","), call.labels["tensors"], strict=True)
    found = [(term, labels) for term, labels in factors if labels is not None]
    if len(found) != 1 or "." in terms:
        return None
    term, labels = found[0]
    summed = [axis for axis, index in enumerate(term) if index not in result]
    if any(changes(labels, axis) for axis in summed):
        return None
    kept = labels[tuple(0 if axis in summed else slice(None) for axis in range(len(term)))]
    left = [index for index in term if index in result]
    kept = kept.permute([left.index(index) for index in result if index in left])
    return kept[tuple(slice(None) if index in left else None for index in result)].expand(
        call.shape
    )


SAME = AxisRule(lambda call: call.first)
"""Element by element."""
MOVED = AxisRule(lambda call: call.run())
"""The operator moves labels as it moves values."""
RESHAPED = AxisRule(lambda call: call.first.reshape(call.shape))
"""In row-major order; a view where the values' memory allows one, while the labels' memory is
another.
"""
JOINED = AxisRule(lambda call: call.run(), ("tensors",))
WRITTEN = AxisRule(lambda call: call.run(), ("input", "src"))
"""The second tensor in a place of the first."""
INDEXED = AxisRule(
    lambda call: _run_beside(
        call, (at for at, i in enumerate(call.arguments["indices"]) if i is not None)
    )
)
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
