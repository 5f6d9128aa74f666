"""Tensors that are somewhere else and come into memory for one operator: weights in files,
codes that are decoded.
"""

from __future__ import annotations

import ctypes
import errno
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import DataError
from quantizer.storage.allocator import give_back
from quantizer.storage.positioned_io import read_into, write_at

CPU = torch.device("cpu")
_reader = ThreadPoolExecutor(1, "prefetch")


class _Reading(threading.local):
    """What a thread reads tensors for."""

    is_pinned = False


_reading = _Reading()


@dataclass
class _Held:
    """Holds the values of a deferred tensor, while someone asks for that."""

    holders: int = 0
    value: Tensor | None = None


class DeferredTensor(Tensor):
    """A tensor that `load` gives whenever an operator needs its values; in between it has a
    shape and a dtype alone.

    Any function of torch takes one and gives an ordinary tensor; detaching one and asking for
    its shape read nothing. It cannot be changed in place.

    Args:
        shape, dtype: of what `load` gives.
        load: gives the same values each time, on the CPU.
        device: where operators find them; they are moved there each time.
        stride: of what it gives, if that is not contiguous.

    >>> ones = DeferredTensor((2, 3), torch.float32, lambda: torch.ones(2, 3))
    >>> ones.shape, (ones + 1).sum()
    (torch.Size([2, 3]), tensor(12.))
    """

    _read: Callable[[], Tensor]
    _coming: Future[Tensor] | None = None
    _held: _Held

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        load: Callable[[], Tensor],
        device: torch.device = CPU,
        stride: Sequence[int] | None = None,
    ) -> DeferredTensor:
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, tuple(shape), stride, dtype=dtype, device=device
        )
        made._read = load
        made._held = _Held()
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def load(self) -> Tensor:
        """Return the values, where the tensor is. Those of a held tensor are shared."""
        if self._held.value is not None:
            return self._held.value
        coming, self._coming = self._coming, None
        read = self._read_for_device() if coming is None else coming.result()
        values = read.to(self.device)
        if self._held.holders:
            self._held.value = values
        return values

    def prefetch(self) -> None:
        """Begin to read the values for the next `load`, in a thread of their own; what it
        raises, `load` raises.
        """
        if self._coming is None and self._held.value is None:
            self._coming = _reader.submit(self._read_for_device)

    def _read_for_device(self) -> Tensor:
        """Return the values on the CPU; those for a GPU in memory that it copies from faster,
        and that is used again.
        """
        _reading.is_pinned = self.device.type == "cuda"
        try:
            return self._read()
        finally:
            _reading.is_pinned = False

    def at(self, device: torch.device) -> DeferredTensor:
        """The same on a device, still deferred."""
        other = DeferredTensor(self.shape, self.dtype, self._read, device, self.stride())
        if device == self.device:
            other._held = self._held
        return other

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Another process gets the values, and puts them into a file of its own."""
        return out_of_memory, (self.load(),)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **kwargs)
            if first is not None and func is Tensor.to and _goes_to_meta(args[1:], kwargs):
                return torch.empty_strided(
                    first.shape, first.stride(), dtype=first.dtype, device="meta"
                )
            if func in _SAME and isinstance(first, DeferredTensor):
                return first.at(CPU if func is Tensor.cpu else first.device)
            if isinstance(first, DeferredTensor) and func in _CHANGES:
                raise RuntimeError("A deferred tensor cannot be changed in place.")
            return func(*loaded(args), **loaded(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """For operators that are called from C++."""
        return func(*loaded(args), **loaded(kwargs or {}))


def _goes_to_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether these arguments of `Tensor.to` ask for the shape alone."""
    target = kwargs.get("device", args[0] if args else None)
    if not isinstance(target, (str, torch.device)) or len(args) + len(kwargs) > 1:
        return False
    return torch.device(target).type == "meta"


@contextmanager
def held(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep what `load` gives of these tensors while this lasts, so that each is read once.

    Tensors that are not deferred stay as they are.
    """
    states = [tensor._held for tensor in tensors if isinstance(tensor, DeferredTensor)]
    for state in states:
        state.holders += 1
    try:
        yield
    finally:
        for state in states:
            state.holders -= 1
            if not state.holders:
                state.value = None


def loaded(value: Any) -> Any:
    """A nested value with ordinary tensors in place of deferred ones."""
    return pytree.tree_map_only(DeferredTensor, lambda tensor: tensor.load(), value)


def beside(source: Tensor, made: Tensor) -> Tensor:
    """What was made of `source`: out of memory, in a temporary file, if that is deferred.

    Raises:
        DataError: there is no room for it.
    """
    return out_of_memory(made) if isinstance(source, DeferredTensor) else made


def derived(source: Tensor, shape: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """What `change` makes of a tensor, of `shape`; made anew whenever it is needed, if that is
    deferred.
    """
    if not isinstance(source, DeferredTensor):
        return change(source)
    return DeferredTensor(shape, source.dtype, lambda: change(source.load()), source.device)


def out_of_memory(tensor: Tensor) -> Tensor:
    """The same in a temporary file, but for an empty one, or one on a GPU with room for it; one
    on the meta device has nothing to write.

    Raises:
        DataError: there is no room for it.
    """
    if isinstance(tensor, DeferredTensor) or not tensor.numel():
        return tensor
    if tensor.is_cuda and _has_room(tensor):
        return tensor
    if tensor.is_meta:
        return DeferredTensor(
            tensor.shape, tensor.dtype, lambda: tensor, tensor.device, tensor.stride()
        )
    return _spool.put(tensor).at(tensor.device)


def _has_room(tensor: Tensor) -> bool:
    """Return whether half of the GPU's memory is free beside a tensor that is there."""
    free, total = torch.cuda.mem_get_info(tensor.device)
    return 2 * free > total


SPOOL_BYTES = 1 << 28
"""From here on another file is begun, so that disk space is given back as tensors go."""


GIVE_BACK_BYTES = 1 << 24
"""So much may be out of memory before the C library is asked to return it."""


class Spool:
    """Takes tensors out of memory, into temporary files without names."""

    def __init__(self) -> None:
        self._file, self._since = _SpoolFile(), 0

    def put(self, tensor: Tensor) -> DeferredTensor:
        """The same values in the same order of memory, read whenever they are needed.

        Raises:
            DataError: there is no room for them.
        """
        if self._file.end > SPOOL_BYTES:
            self._file = _SpoolFile()
        # The layout decides the order of additions
        stride = torch.empty_like(tensor, device="meta").stride()
        order = sorted(range(tensor.dim()), key=stride.__getitem__, reverse=True)
        try:
            stored = self._file.put(tensor.permute(order))
        except OSError as error:
            raise DataError(
                f"no room for the network's values in {tempfile.gettempdir()}: "
                f"{error.strerror}",
                help="set TMPDIR to a folder on a larger disk, or calibrate with a smaller "
                "--subset_len",
            ) from error
        self._since += tensor.nbytes
        if self._since > GIVE_BACK_BYTES:
            self._since = 0
            give_back()
        back = [order.index(axis) for axis in range(tensor.dim())]
        return DeferredTensor(
            tensor.shape, tensor.dtype, lambda: stored.load().permute(back), stride=stride
        )


class _SpoolFile:
    """It is gone with the last of its tensors."""

    def __init__(self) -> None:
        self.end = 0

    @cached_property
    def file(self) -> int:
        file = tempfile.TemporaryFile(prefix="quantizer-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        return file.fileno()

    def put(self, tensor: Tensor) -> DeferredTensor:
        start, content = self.end, memoryview(bytes_of(tensor))
        while content:
            count = write_at(self.file, content, self.end)
            content, self.end = content[count:], self.end + count
        return DeferredTensor(
            tensor.shape, tensor.dtype, partial(self._read, start, tensor.shape, tensor.dtype)
        )

    def _read(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return read_tensor(self.file, start, shape, dtype)


def read_tensor(file: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes begin at `start` of an open file.

    Raises:
        OSError: it cannot be read, or ends before the tensor does.
    """
    made = torch.empty(shape, dtype=dtype, pin_memory=_reading.is_pinned)
    content = memoryview(bytes_of(made))
    while content:
        count = read_into(file, content, start)
        if not count:
            raise OSError(errno.EIO, "the file was cut off while it was read")
        content, start = content[count:], start + count
    return made


_spool = Spool()


def bytes_of(tensor: Tensor) -> bytes:
    """What a tensor holds, as an object with these bytes; without a copy where they lie in
    order on the CPU.
    """
    values = loaded(tensor.detach().cpu()).resolve_conj().resolve_neg()
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return b""
    # Its memory, without numpy
    found: Any = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    found.tensor = flat  # as long as someone reads it
    return found  # type: ignore[no-any-return]  # a buffer is as good as bytes to files and digests


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_FACTS = {
    *map(
        _getter,
        (
            "shape",
            "dtype",
            "device",
            "ndim",
            "layout",
            "requires_grad",
            "is_leaf",
            "grad",
            "grad_fn",
        ),
    ),
    *map(_getter, ("is_meta", "is_sparse", "is_quantized", "is_cuda", "nbytes", "itemsize")),
    *(
        Tensor.dim,
        Tensor.size,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
    ),
    *(
        Tensor.is_complex,
        Tensor.requires_grad_,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.__len__,
        Tensor.__hash__,
    ),
}
"""What is known without the values."""
_SAME = {Tensor.detach, Tensor.cpu, _getter("data")}
_CHANGES = {
    *(
        method
        for name, method in vars(torch._C.TensorBase).items()
        if name.endswith("_") and name[0] != "_"
    ),
    *(Tensor.__setitem__, Tensor.data.__set__),  # type: ignore[attr-defined]
} - _FACTS
