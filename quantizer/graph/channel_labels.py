"""Which channel of a layer each element downstream is a multiple of: tensors of channel numbers, moved as values are.

A label is the number of a channel, or `NONE`. An operator carries labels on where a factor on a channel of what it
reads is the same factor on the elements that it makes. Labels lie in memory once: axes along which they are all alike
have stride 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Node, Ref, map_refs, references
from quantizer.graph.targets import call

NONE = -1


@dataclass(frozen=True)
class Step:
    """A node, the labels that it may carry on (`Carrier.paths`), and all values' shapes (`fake_values`)."""

    node: Node
    labels: Mapping[str, Any]
    values: Mapping[str, Any]

    def of(self, key: str) -> Tensor | None:
        """The labels of one argument."""
        value = self.node.inputs.get(key)
        found = self.labels.get(value.name) if isinstance(value, Ref) else None
        return found if isinstance(found, Tensor) else None

    @property
    def first(self) -> Tensor | None:
        """The labels of the first argument."""
        return self.of(next(iter(self.node.inputs)))

    @property
    def shape(self) -> torch.Size:
        """The shape of what the node makes."""
        return torch.Size(self.values[self.node.name].shape)


LabelRule = Callable[[Step], Any]


@dataclass(frozen=True)
class Carrier:
    """`rule` gives the labels of what an operator makes, None where it mixes channels; they come by way of `keys`.

    Without keys it is the first argument.
    """

    rule: LabelRule
    keys: tuple[str, ...] = ()

    def paths(self, node: Node) -> tuple[str, ...]:
        """Names of the nodes whose labels the node may carry on."""
        keys = self.keys or tuple(node.inputs)[:1]
        return tuple(name for key in keys for name in references(node.inputs.get(key)))


def carried(step: Step) -> Any:
    """Labels of what the node makes (a tensor, or several), or None where a factor does not pass through it."""
    carrier = CARRIERS.get(step.node.op)
    if carrier is None or step.node.name not in step.values:
        return None
    try:
        found = carrier.rule(step)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # labels are floats on the CPU: an operator that cannot move them is not followed
    if isinstance(found, (list, tuple)):
        return [compressed(item) for item in found]
    return compressed(found) if found is not None and found.shape == step.shape else None


def compressed(labels: Tensor) -> Tensor:
    """The same labels, with stride 0 along each axis along which they do not change."""
    for axis, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        first = labels.narrow(axis, 0, min(size, 1))
        if (
            size > 1
            and stride
            and torch.equal(first, labels.narrow(axis, size - 1, 1))
            and bool((labels == first).all())
        ):
            labels = first.expand(labels.shape)
    return labels


def channels_along(labels: Tensor, axis: int) -> tuple[int, ...] | None:
    """The labels along one axis, None where they change along another; of `compressed` labels."""
    axis %= labels.dim()
    for other in range(labels.dim()):
        if other != axis and labels.shape[other] > 1 and labels.stride(other):
            return None
    vector = labels[tuple(slice(None) if each == axis else 0 for each in range(labels.dim()))]
    return tuple(int(label) for label in vector.tolist())


def distinct(labels: Any) -> frozenset[int]:
    """All channels among the labels of one value."""
    if isinstance(labels, (list, tuple)):
        return frozenset().union(*map(distinct, labels))
    once = labels[tuple(slice(None) if stride else slice(0, 1) for stride in labels.stride())]
    return frozenset(int(label) for label in once.unique().tolist() if label != NONE)


def _same(step: Step) -> Any:
    return step.first if step.node.is_float else None


def _moved(step: Step) -> Any:
    """Run the operator on the labels; other values are no channels."""
    inputs = {key: map_refs(value, lambda name: _stand_in(step, name)) for key, value in step.node.inputs.items()}
    return call(step.node.target, {**step.node.attrs, **inputs})


def _reshaped(step: Step) -> Any:
    """A view where the values' memory allows one; the labels' memory is another."""
    return step.first.reshape(step.shape) if step.first is not None else None


def _stand_in(step: Step, name: str) -> Any:
    if name in step.labels:
        return step.labels[name]
    value = step.values[name]
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool:
        raise ValueError("what a mask selects is not known")
    return torch.full((), NONE if value.is_floating_point() else 0, dtype=value.dtype).expand(value.shape)


def _indexed(step: Step) -> Any:
    """What indices select is not known, but labels are alike along their axes."""
    labels, indices = step.first, step.node.inputs.get("indices") or step.node.attrs.get("indices")
    if labels is None or indices is None:
        return None
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    return _moved(step) if not any(_changes(labels, axis) for axis in axes) else None


def _selected(step: Step) -> Any:
    return _moved(step) if step.first is not None and not _changes(step.first, step.node.attrs["dim"]) else None


def _changes(labels: Tensor, axis: int) -> bool:
    return labels.shape[axis] > 1 and labels.stride(axis) != 0


def _over(labels: Tensor | None, axes: Iterable[int], shape: torch.Size) -> Tensor | None:
    """Labels of a value of another size along axes along which they are alike."""
    axes = tuple(axes)
    if labels is None or any(_changes(labels, axis) for axis in axes):
        return None
    for axis in axes:
        labels = labels.narrow(axis, 0, 1)
    return labels.expand(shape)


def _spatial(step: Step) -> Any:
    """Pooling and resizing: their number of axes is in the operator's name, else it is all but two."""
    name, dims = step.node.op, len(step.shape) - 2
    dims = int(name[-2]) if name[-1] == "d" else dims
    return _over(step.first, range(-dims, 0), step.shape)


def _padded(step: Step) -> Any:
    """Padding with zeros, or with the channel's own values."""
    attrs = step.node.attrs
    zeros = attrs.get("mode", "constant") != "constant" or not attrs.get("value")
    return _over(step.first, range(-(len(attrs["pad"]) // 2), 0), step.shape) if zeros else None


def _reduced(step: Step) -> Any:
    """Mean, sum and extremes along axes."""
    labels, dims = step.first, step.node.attrs.get("dim")
    if labels is None:
        return None
    axes = [dims] if isinstance(dims, int) else list(dims or range(labels.dim()))
    if any(_changes(labels, axis) for axis in axes):
        return None
    return labels.amax(axes, keepdim=bool(step.node.attrs.get("keepdim")))


def _product(step: Step) -> Any:
    """One factor has labels; the other may be anything that does not depend on them."""
    if step.node.attrs.get("rounding_mode"):
        return None
    found = [labels for key in ("input", "other") if (labels := step.of(key)) is not None]
    return found[0].expand(step.shape) if len(found) == 1 else None


def _attention(step: Step) -> Any:
    """A mean of the values; several heads of queries may share one of them."""
    labels = step.of("value")
    if labels is not None and labels.dim() > 2 and labels.shape[-3] != step.shape[-3]:
        labels = labels.repeat_interleave(step.shape[-3] // labels.shape[-3], -3)
    return _over(labels, [-2], step.shape)


def _matrix_product(step: Step) -> Any:
    """One factor has labels, alike along what is summed over."""
    left, right = step.of("input"), step.of("other" if "other" in step.node.inputs else "mat2")
    if (left is None) == (right is None):
        return None
    return _over(left, [-1], step.shape) if left is not None else _over(right, [-2], step.shape)


def _einsum(step: Step) -> Any:
    """As a product of matrices; each index of the result that the labelled factor lacks repeats its labels."""
    terms, result = step.node.attrs["equation"].replace(" ", "").split("->")
    names = [ref.name for ref in step.node.inputs["tensors"]]
    found = [(term, step.labels[n]) for term, n in zip(terms.split(","), names, strict=True) if n in step.labels]
    if len(found) != 1 or "." in terms:
        return None
    term, labels = found[0]
    summed = [axis for axis, index in enumerate(term) if index not in result]
    if any(_changes(labels, axis) for axis in summed):
        return None
    kept = labels[tuple(0 if axis in summed else slice(None) for axis in range(len(term)))]
    left = [index for index in term if index in result]
    kept = kept.permute([left.index(index) for index in result if index in left])
    return kept[tuple(slice(None) if index in left else None for index in result)].expand(step.shape)


def _names() -> Iterator[tuple[Carrier, str]]:
    """The rows of the table, by what the operators do."""
    moves = "permute transpose mT numpy_T adjoint movedim swapaxes squeeze unsqueeze slice select narrow expand repeat"
    moves += " repeat_interleave chunk split unbind getitem roll flip pixel_shuffle pixel_unshuffle channel_shuffle"
    pools = " ".join(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in "123")
    for rule, names, keys in (
        (
            _same,
            "relu leaky_relu prelu dropout contiguous clone to type_as quant_stub dequant_stub input_scale neg abs",
            "",
        ),
        (_reshaped, "reshape flatten unflatten view_as reshape_as", ""),
        (_moved, moves, ""),
        (_moved, "cat stack", "tensors"),
        (_indexed, "index", ""),
        (_selected, "index_select gather", ""),
        (_spatial, f"{pools} interpolate upsample_nearest", ""),
        (_padded, "pad", ""),
        (_reduced, "mean sum amax amin", ""),
        (_product, "mul", "input other"),
        (_product, "div", "input"),
        (_attention, "scaled_dot_product_attention", "value"),
        (_matrix_product, "matmul", "input other"),
        (_matrix_product, "mm bmm", "input mat2"),
        (_einsum, "einsum", "tensors"),
    ):
        carrier = Carrier(rule, tuple(keys.split()))
        yield from ((carrier, name) for name in names.split())


CARRIERS: dict[str, Carrier] = {name: carrier for carrier, name in _names()}
