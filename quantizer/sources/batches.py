"""Convert items of the user's data into batches, and compute a fingerprint of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from quantizer.config.wording import a_kind
from quantizer.errors import BatchError, DataError
from quantizer.sources.arguments import (
    MASK,
    Arguments,
    FilledArguments,
    filled_arguments,
    included_positions,
    text_prefix,
)
from quantizer.sources.tensor_kinds import PLAIN_TENSORS_HELP, dtype_name, unsupported_reason

UNSCORED = -100
"""The target of a token that is not scored. It is the `ignore_index` of torch's
cross_entropy.
"""
_SAMPLED = 1024
"""How many values of each tensor the fingerprint includes by position."""


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of the model, `module(*args, **kwargs)`.

    Tensors have the samples along dimension 0.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        target: the labels, or None if the data has none.
        raw: the item as the user's data gave it. `evaluate` gets it.
        left_out: the names of tensors for which the model has no argument.
        is_stable: whether the tensors keep their values when the next batch is read. A loader
            may reuse their memory. To keep a batch, call `stable()`.
        number: of the user's batch that it is, or is a part of; None if it is not numbered.
        rows: the numbers of its samples in the user's batch, if it is a part of that.
        included: bool [batch, positions], which positions hold tokens; None if all do, or if
            that is not known.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Tensor | None
    raw: Any
    left_out: tuple[str, ...] = ()
    is_stable: bool = True
    number: int | None = None
    rows: tuple[int, ...] | None = None
    included: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, target: Tensor | None = None) -> Batch:
        """Return the batch of one input, and of its labels if there are any."""
        raw = x if target is None else (x, target)
        return cls((x,), {}, target, raw)

    @property
    def size(self) -> int:
        """Return the number of samples: dimension 0 of the first input tensor."""
        _, first = next(self.tensors())
        return first.shape[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the input tensors, nested ones too, with names such as `args[0]` and
        `kwargs['mask']`.
        """
        yield from _named_tensors("args", self.args)
        yield from _named_tensors("kwargs", self.kwargs)

    def filled(self, arguments: Arguments) -> FilledArguments:
        """Return which arguments of `forward` the batch fills."""
        filled = filled_arguments(self.args, self.kwargs, self.target, arguments)
        return replace(filled, left_out=self.left_out)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`."""
        moved = self._map(lambda tensor: tensor.to(device))
        before = dict(self.tensors())
        after = dict(moved.tensors())
        are_copies = all(after[name] is not before[name] for name in before)
        return replace(moved, is_stable=self.is_stable or are_copies)

    def with_inputs(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch without a target, with each input tensor replaced, in the order of
        `tensors`.
        """
        args = _map_tensors(function, self.args)
        kwargs = _map_tensors(function, self.kwargs)
        return Batch(args, kwargs, None, kwargs or args[0])

    def stable(self) -> Batch:
        """Return a batch whose tensors no loader overwrites: this one, or a copy."""
        if self.is_stable:
            return self
        return replace(self._map(_copy), is_stable=True)

    def detached(self) -> Batch:
        """Return the batch with tensors that need no gradients and are not negated views."""
        return self._map(lambda tensor: tensor.detach().resolve_neg())

    def with_included(self, names: Sequence[str]) -> Batch:
        """Return a batch of test data that knows which of its positions are padding.

        A call with several texts keeps all of its positions, because an output may be of any
        text.

        Args:
            names: of the model's positional arguments.
        """
        arguments = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        if len(set(map(text_prefix, arguments))) > 1:
            return self
        return replace(self, included=included_positions(arguments.get(MASK)))

    def first(self, count: int) -> Batch:
        """Return the first `count` samples."""
        return self._cut(slice(count))

    def last(self, count: int) -> Batch:
        """Return the last `count` samples."""
        return self._cut(slice(self.size - count, None))

    def _cut(self, samples: slice) -> Batch:
        """Return some samples. Tensors of another size along dimension 0 stay whole."""
        size = self.size

        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() and tensor.shape[0] == size:
                return tensor[samples]
            return tensor

        return self._map(cut)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each tensor replaced. A tensor that `args` and `raw` share is
        replaced once.
        """
        results: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in results:
                results[id(tensor)] = function(tensor)
            return results[id(tensor)]

        return replace(
            self,
            args=_map_tensors(once, self.args),
            kwargs=_map_tensors(once, self.kwargs),
            target=_map_tensors(once, self.target),
            raw=_map_tensors(once, self.raw),
        )


class Fingerprint:
    """The number, shapes, dtypes and a digest of the batches passed to `update`, in their
    order.

    Runs with different fingerprints have used different data. Runs with equal fingerprints have
    almost certainly used the same data: the digest is not a cryptographic hash.

    Attributes:
        digests: of the batches up to each one.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.batches = 0
        self.digests: list[str] = []
        self._inputs: dict[str, set[str]] = {}
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, batch: Batch) -> None:
        """Add the inputs of one batch."""
        self.samples += batch.size
        self.batches += 1
        for name, tensor in batch.tensors():
            kind = f"{dtype_name(tensor.dtype)}{list(tensor.shape[1:])}"
            self._inputs.setdefault(name, set()).add(kind)
            rows = tensor.shape[0] if tensor.dim() else 1
            text = f"{name}:{kind}:{rows}:{_digest(tensor)}"
            self._hash.update(text.encode())
        self.digests.append(self.digest)

    def with_batch(self, batch: Batch) -> Fingerprint:
        """Return the fingerprint of these batches and one more."""
        other = Fingerprint()
        other.samples = self.samples
        other.batches = self.batches
        other._inputs = {name: set(kinds) for name, kinds in self._inputs.items()}
        other._hash = self._hash.copy()
        other.update(batch)
        return other

    @property
    def digest(self) -> str:
        """Return the digest of the batches so far."""
        return self._hash.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return for example `{"samples": 256, "batches": 8, "inputs": {"args[0]":
        ["float32[1, 8, 8]"]}, "digest": "…"}`.
        """
        inputs = {}
        for name in sorted(self._inputs):
            inputs[name] = sorted(self._inputs[name])
        return {
            "samples": self.samples,
            "batches": self.batches,
            "inputs": inputs,
            "digest": self.digest,
        }


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Add `place` before the message of a `DataError` that is raised inside the `with`
    block.
    """
    try:
        yield
    except DataError as error:
        raise type(error)(f"{place}{error.message.marked}", help=error.help) from error


def prefix_batch_errors(
    number: int, batch: Batch | None = None
) -> AbstractContextManager[None]:
    """Add the number of a batch, from 0, before the message of a `DataError` that is raised
    inside the `with` block.

    Args:
        number: of the batch, unless it has a number itself.
        batch: the batch.
    """
    if batch is not None and batch.number is not None:
        number = batch.number
    return prefix_errors(f"batch {number}: ")


def as_batch(item: Any, arguments: Arguments) -> Batch:
    """Return the batch of a user's item for a `forward` with these arguments.

    A tensor is the input. A dict gives keyword arguments, and perhaps a target. A tuple or list
    gives positional inputs, and its last element may be the target (`Arguments.has_target`).

    Raises:
        BatchError: the item is something else.
    """
    if isinstance(item, Tensor):
        batch = Batch.of(item)
    elif isinstance(item, Mapping):
        batch = _from_mapping(item, None, item, arguments)
    elif isinstance(item, tuple | list):
        batch = _from_sequence(item, arguments)
    else:
        raise BatchError(
            f"is {a_kind(item)}, not a tensor, a tuple or a dict of tensors",
            help=_remedy_for_item(item),
        )
    _check_samples(batch)
    tensors = [*batch.tensors(), *_named_tensors("raw", batch.raw)]
    if any(tensor.requires_grad or tensor.is_neg() for _, tensor in tensors):
        return batch.detached()
    return batch


def _remedy_for_item(item: Any) -> str:
    """Return what to do with an item that is not a batch."""
    if hasattr(item, "__array_interface__"):
        return "torch.from_numpy(array) makes a tensor of an array"
    if isinstance(item, str | PurePath):
        return "give a tensor of what is in the file, or of the tokens of the text"
    return "a batch is a tensor whose dimension 0 counts the samples"


def _from_mapping(
    item: Mapping[Any, Any], target: Any, raw: Any, arguments: Arguments
) -> Batch:
    """Return the batch of keyword arguments; a label among them replaces `target`."""
    if not all(isinstance(name, str) for name in item):
        raise BatchError("is a dict with keys that are not strings")
    labels = [name for name in arguments.labels if name in item]
    if labels:
        target = item[labels[0]]
    kwargs = {name: value for name, value in item.items() if name not in labels}
    arguments.require(list(kwargs))
    return Batch((), kwargs, _tensor_or_none(target), raw)


def _from_sequence(item: tuple[Any, ...] | list[Any], arguments: Arguments) -> Batch:
    """Return the batch of positional inputs, or of a dict and a target."""
    if not arguments.has_target(item):
        return Batch(tuple(item), {}, None, item)
    *args, target = item
    if isinstance(target, int | float):
        raise BatchError(
            "is one sample and its label, or a list of numbers, not a batch of tensors",
            help="wrap samples: torch.utils.data.DataLoader(dataset, batch_size=32); "
            "torch.tensor([numbers]) makes a batch of numbers",
        )
    if arguments.needed == 1 and len(args) == 1 and isinstance(args[0], Mapping):
        return _from_mapping(args[0], target, item, arguments)
    return Batch(tuple(args), {}, _tensor_or_none(target), item)


def _tensor_or_none(target: Any) -> Tensor | None:
    return target if isinstance(target, Tensor) else None


def _check_samples(batch: Batch) -> None:
    """Raise `BatchError` if torch cannot compute with a tensor, or the batch has no samples."""
    inputs = list(batch.tensors())
    tensors = list(inputs)
    tensors += _named_tensors("target", batch.target)
    tensors += _named_tensors("item", batch.raw)
    for name, tensor in tensors:
        reason = unsupported_reason(tensor)
        if reason is not None:
            raise BatchError(
                f"cannot be computed with: {name} {reason}", help=PLAIN_TENSORS_HELP
            )
    if not inputs:
        values = [value for value in (*batch.args, *batch.kwargs.values()) if value is not None]
        raise BatchError(
            "holds no tensor for an input", help=_remedy_for_item(next(iter(values), None))
        )
    name, tensor = inputs[0]
    if tensor.dim() == 0:
        raise BatchError(
            f"is not a batch: {name} is a single number, without a dimension for the samples"
        )
    if tensor.shape[0] == 0:
        raise BatchError(f"is empty: {name} has the shape {list(tensor.shape)}")


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _named_tensors(f"{name}[{key!r}]", element)
    elif isinstance(value, tuple | list):
        for index, element in enumerate(value):
            yield from _named_tensors(f"{name}[{index}]", element)


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        results = {}
        for key, element in value.items():
            results[key] = _map_tensors(function, element)
        return results
    if isinstance(value, tuple | list):
        elements = [_map_tensors(function, element) for element in value]
        if hasattr(value, "_fields"):
            return type(value)(*elements)
        return type(value)(elements)
    return value


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of the tensor. Kernels add up values in the order of the
    strides, so only then the copy gives the same results.

    The memory from the first to the last value is copied. For an expanded tensor this is less
    than its number of values. A view that uses less than half of that memory gets contiguous
    strides instead.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    is_plain = type(values) is Tensor and values.layout is torch.strided
    if not is_plain or values.numel() == 0:
        return values.clone()
    span = 1
    for size, stride in zip(values.shape, values.stride(), strict=True):
        span += (size - 1) * stride
    if span > 2 * values.numel():
        return values.clone()
    memory = values.as_strided((span,), (1,)).clone()
    return memory.as_strided(values.shape, values.stride(), 0)


def _digest(tensor: Tensor) -> tuple[int, list[int]]:
    """Return the sum of all values, and some evenly spaced ones, all read as integers.

    The sum depends on each value, but not on their order. The spaced values show the order.

    A cryptographic hash of 100 images of 224x224 takes 90 ms, 3 % of a calibration pass. This
    digest takes a tenth of that.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    bits = values.contiguous().reshape(-1).view(torch.uint8)
    if bits.numel() % 8 == 0:
        if bits.storage_offset() % 8:
            # torch reads 8 bytes only from a multiple of 8 on
            bits = bits.clone()
        bits = bits.view(torch.int64)
    step = max(1, bits.numel() // _SAMPLED)
    total = bits.sum(dtype=torch.int64)
    return int(total), bits[::step].tolist()
