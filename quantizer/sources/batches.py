"""One batch in the form the engine feeds to a model, how a user's item becomes one, and a
fingerprint of several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.sources.arguments import Arguments, Filled, filled
from quantizer.sources.tensor_kinds import oddity

PLAIN = "give dense tensors of plain numbers: to_dense(), dequantize(), float()"
_SAMPLED = 1024


@dataclass(frozen=True)
class Batch:
    """What one call of the model gets, `module(*args, **kwargs)`; `raw` is the item as the
    user's data gave it.

    Tensors carry the samples along dimension 0. `target` is None if the data has no labels;
    `left_out` names what else there is, for which the model has no argument. The tensors of a
    batch that is not `is_stable` may be overwritten when the next batch is asked for; who keeps
    such a batch for longer keeps `stable()` of it.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Tensor | None
    raw: Any
    left_out: tuple[str, ...] = ()
    is_stable: bool = True

    @classmethod
    def of(cls, x: Tensor, target: Tensor | None = None) -> Batch:
        """The batch of one input, and of its labels if there are any."""
        return cls((x,), {}, target, x if target is None else (x, target))

    @property
    def size(self) -> int:
        """Number of samples: dimension 0 of the first input tensor."""
        return next(iter(self.tensors()))[1].shape[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The input tensors, nested ones too, with a name each: `args[0]`, `kwargs['mask']`,
        …
        """
        yield from _leaves("args", self.args)
        yield from _leaves("kwargs", self.kwargs)

    def filled(self, given: Arguments) -> Filled:
        """The arguments of `forward` that it fills, of those that are given."""
        return replace(
            filled(self.args, self.kwargs, self.target, given), left_out=self.left_out
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch with its tensors on `device`."""
        moved = self._map(lambda tensor: tensor.to(device))
        pairs = zip(self.tensors(), moved.tensors(), strict=True)
        are_copies = all(tensor is not other for (_, tensor), (_, other) in pairs)
        return replace(moved, is_stable=self.is_stable or are_copies)

    def stable(self) -> Batch:
        """Return a batch of these values that no loader overwrites: itself, or copies that lie
        in memory alike.
        """
        if self.is_stable:
            return self
        return replace(self._map(_copy), is_stable=True)

    def first(self, count: int) -> Batch:
        """The first `count` samples."""
        size = self.size
        return self._map(
            lambda tensor: (
                tensor[:count] if tensor.dim() and tensor.shape[0] == size else tensor
            )
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each tensor replaced; what is one tensor in `args` and `raw`
        stays one.
        """
        results: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in results:
                results[id(tensor)] = function(tensor)
            return results[id(tensor)]

        changed = {
            name: _map_tensors(once, getattr(self, name))
            for name in ("args", "kwargs", "target", "raw")
        }
        return replace(self, **changed)


class Fingerprint:
    """Count, shapes, dtypes and a digest of the batches given to `update`, in their order.

    It tells whether two runs saw the same data, at the cost of one read of them; it is no
    proof.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.batches = 0
        self._inputs: dict[str, set[str]] = {}
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, batch: Batch) -> None:
        """Add the inputs of one batch."""
        self.samples += batch.size
        self.batches += 1
        for name, tensor in batch.tensors():
            kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
            self._inputs.setdefault(name, set()).add(kind)
            self._hash.update(f"{name}:{kind}:{tensor.shape[0]}:{_digest(tensor)}".encode())

    def to_json(self) -> dict[str, Any]:
        """For example `{"samples": 256, "batches": 8, "inputs": {"args[0]": ["float32[1, 8,
        8]"]}, "digest": "…"}`.
        """
        inputs = {name: sorted(kinds) for name, kinds in sorted(self._inputs.items())}
        return {
            "samples": self.samples,
            "batches": self.batches,
            "inputs": inputs,
            "digest": self._hash.hexdigest(),
        }


def not_finite(tensor: Tensor, is_sound: Callable[[Tensor], Tensor] = torch.isfinite) -> int:
    """How many values are not sound; a finite sum proves that all are finite, and reads each
    once.
    """
    if not tensor.is_floating_point() or torch.isfinite(tensor.float().sum()):
        return 0
    return tensor.numel() - int(is_sound(tensor.double()).sum())


@contextmanager
def naming(place: str) -> Iterator[None]:
    """A DataError from within begins with `place`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}{error.message}", help=error.help) from error


def naming_batch(number: int) -> AbstractContextManager[None]:
    """A DataError from within says in which batch it was, the first being 0."""
    return naming(f"batch {number}: ")


def as_batch(item: Any, given: Arguments) -> Batch:
    """The batch that a user's item stands for, given what `forward` takes.

    A tensor is the input. A dict gives keyword arguments, apart from its target. A tuple or
    list gives the positional inputs, of which the last may be the target
    (`Arguments.has_target`).

    Raises:
        DataError: it is something else.
    """
    if isinstance(item, Tensor):
        batch = Batch.of(item)
    elif isinstance(item, Mapping):
        batch = _from_mapping(item, None, item, given)
    elif isinstance(item, tuple | list):
        batch = _from_sequence(item, given)
    else:
        raise DataError(f"is {a_kind(item)}, not a tensor, a tuple or a dict of tensors")
    _check_samples(batch)
    return batch


def _from_mapping(item: Mapping[Any, Any], target: Any, raw: Any, given: Arguments) -> Batch:
    if not all(isinstance(name, str) for name in item):
        raise DataError("is a dict whose keys are not all names of the model's inputs")
    names = [name for name in given.labels if name in item]
    if names:
        target = item[names[0]]
    kwargs = {name: value for name, value in item.items() if name not in names}
    return Batch((), kwargs, target if isinstance(target, Tensor) else None, raw)


def _from_sequence(item: tuple[Any, ...] | list[Any], given: Arguments) -> Batch:
    if not given.has_target(item):
        return Batch(tuple(item), {}, None, item)
    *args, target = item
    if isinstance(target, int | float):
        raise DataError("is one sample and its label, not a batch of them")
    if given.needed == 1 and len(args) == 1 and isinstance(args[0], Mapping):
        return _from_mapping(args[0], target, item, given)
    return Batch(tuple(args), {}, target if isinstance(target, Tensor) else None, item)


def _check_samples(batch: Batch) -> None:
    tensors = list(batch.tensors())
    for name, tensor in (
        *tensors,
        *_leaves("target", batch.target),
        *_leaves("item", batch.raw),
    ):
        if (reason := oddity(tensor)) is not None:
            raise DataError(f"cannot be computed with: {name} {reason}", help=PLAIN)
    if not tensors:
        raise DataError("holds no tensor")
    name, tensor = tensors[0]
    if tensor.dim() == 0:
        raise DataError(
            f"is not a batch: {name} is a single number, without a dimension for the samples"
        )
    if tensor.shape[0] == 0:
        raise DataError(f"is empty: {name} has the shape {list(tensor.shape)}")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _leaves(f"{name}[{key!r}]", element)
    elif isinstance(value, tuple | list):
        for index, element in enumerate(value):
            yield from _leaves(f"{name}[{index}]", element)


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(function, element) for key, element in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(function, element) for element in value))
    if isinstance(value, tuple | list):
        return type(value)(_map_tensors(function, element) for element in value)
    return value


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of the tensor, so that kernels add up its values in the
    same order.

    Memory is copied from the first value to the last: of an expanded tensor that is as little
    as it has. A view that leaves most of that out is copied value by value.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if type(values) is not Tensor or values.layout is not torch.strided or not values.numel():
        return values.clone()
    steps = zip(values.shape, values.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    if span > 2 * values.numel():
        return values.clone()
    memory = values.as_strided((span,), (1,)).clone()
    return memory.as_strided(values.shape, values.stride(), 0)


def _digest(tensor: Tensor) -> tuple[int, list[int]]:
    """The exact sum of the bits read as integers, and some evenly spaced ones, which keep the
    order.

    A cryptographic hash of 100 images of 224x224 takes 90 ms, 3 % of a calibration pass; this
    takes a tenth of it.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    octets = plain.contiguous().reshape(-1).view(torch.uint8)
    bits = octets.view(torch.int64) if octets.numel() % 8 == 0 else octets
    step = max(1, bits.numel() // _SAMPLED)
    return int(bits.sum(dtype=torch.int64)), bits[::step].tolist()
