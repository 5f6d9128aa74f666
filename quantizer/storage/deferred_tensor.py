"""Tensors whose values come into memory only while an operator computes with them: weights in
files, codes that are decoded.
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
from functools import cached_property
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
    """Says whether a thread reads into pinned memory, which a GPU copies from faster."""

    is_pinned = False


_reading = _Reading()


@dataclass
class _Held:
    """Keeps the values of a deferred tensor while it has holders."""

    holders: int = 0
    value: Tensor | None = None


class DeferredTensor(Tensor):
    """A tensor that calls `load` whenever an operator needs its values. In between it has only
    a shape and a dtype.

    Any function of torch takes one and returns an ordinary tensor. Detaching it and asking for
    its shape read nothing. It cannot be changed in place.

    Args:
        shape, dtype: of what `load` returns.
        load: returns the same values each time, on the CPU.
        device: the device of the tensor; the values are moved there each time.
        stride: of what `load` returns, if that is not contiguous.

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
        *,
        stride: Sequence[int] | None = None,
    ) -> DeferredTensor:
        tensor: DeferredTensor = Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            stride,
            dtype=dtype,
            device=device,
        )
        tensor._read = load
        tensor._held = _Held()
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def load(self) -> Tensor:
        """Return the values on the tensor's device. Those of a held tensor are shared."""
        if self._held.value is not None:
            return self._held.value
        coming = self._coming
        self._coming = None
        values = self._read_for_device() if coming is None else coming.result()
        values = values.to(self.device)
        if self._held.holders:
            self._held.value = values
        return values

    def prefetch(self) -> None:
        """Begin to read the values for the next `load` in a thread.

        An error there is raised by `load`.
        """
        if self._coming is None and self._held.value is None:
            self._coming = _reader.submit(self._read_for_device)

    def _read_for_device(self) -> Tensor:
        """Return the values on the CPU, in pinned memory if the tensor is on a GPU."""
        was_pinned = _reading.is_pinned
        # What a tensor is made of may be deferred itself
        _reading.is_pinned = was_pinned or self.device.type == "cuda"
        try:
            return self._read()
        finally:
            _reading.is_pinned = was_pinned

    def at(self, device: torch.device) -> DeferredTensor:
        """Return the tensor on a device, still deferred."""
        other = DeferredTensor(
            self.shape,
            self.dtype,
            self._read,
            device,
            stride=self.stride(),
        )
        if device == self.device:
            other._held = self._held
        return other

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pass the values to another process, which puts them into a file of its own."""
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
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **kwargs)
            if func is Tensor.to and _goes_to_meta(args[1:], kwargs):
                return torch.empty_strided(
                    first.shape,
                    first.stride(),
                    dtype=first.dtype,
                    device="meta",
                )
            if isinstance(first, DeferredTensor) and func in _SAME:
                device = CPU if func is Tensor.cpu else first.device
                return first.at(device)
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
        """Run an operator that is called from C++."""
        return func(*loaded(args), **loaded(kwargs or {}))


def _goes_to_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the only argument of `Tensor.to` is the meta device."""
    values = [*args, *kwargs.values()]
    if len(values) != 1 or not isinstance(values[0], (str, torch.device)):
        return False
    return torch.device(values[0]).type == "meta"


@contextmanager
def held(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the values of deferred tensors inside the `with` block, each read once."""
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
    """Return a nested value with ordinary tensors in place of deferred ones."""
    return pytree.tree_map_only(DeferredTensor, lambda tensor: tensor.load(), value)


def beside(source: Tensor, result: Tensor) -> Tensor:
    """Return what was computed from `source`: in a temporary file, if that is deferred.

    Raises:
        DataError: the disk has no room for it.
    """
    if isinstance(source, DeferredTensor):
        return out_of_memory(result)
    return result


def derived(
    source: Tensor,
    shape: Sequence[int],
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return `change(source)`, which has `shape`. If `source` is deferred, so is the result,
    which is computed again each time.
    """
    if not isinstance(source, DeferredTensor):
        return change(source)
    return DeferredTensor(shape, source.dtype, lambda: change(source.load()), source.device)


def out_of_memory(tensor: Tensor) -> Tensor:
    """Return a deferred tensor with the same values in a temporary file.

    An empty tensor, and one on a GPU with room for it, are returned as they are. One on the
    meta device becomes deferred without a file.

    Raises:
        DataError: the disk has no room for it.
    """
    if isinstance(tensor, DeferredTensor) or not tensor.numel():
        return tensor
    if tensor.is_cuda and _has_room(tensor):
        return tensor
    if tensor.is_meta:
        return DeferredTensor(
            tensor.shape,
            tensor.dtype,
            lambda: tensor,
            tensor.device,
            stride=tensor.stride(),
        )
    return _spool.put(tensor).at(tensor.device)


def _has_room(tensor: Tensor) -> bool:
    """Return whether half of the memory of a tensor's GPU is free."""
    free, total = torch.cuda.mem_get_info(tensor.device)
    return 2 * free > total


_MAX_FILE_BYTES = 1 << 28
"""A file that is larger is not written to any more. Its disk space is freed with the last of
its tensors.
"""
_GIVE_BACK_BYTES = 1 << 24
"""After so many bytes the C library is asked to return freed memory to the system."""


class Spool:
    """Moves tensors out of memory, into temporary files without names."""

    def __init__(self) -> None:
        self._file = _SpoolFile()
        self._since_give_back = 0

    def put(self, tensor: Tensor) -> DeferredTensor:
        """Write a tensor, and return a deferred one with the same values and stride.

        Raises:
            DataError: the disk has no room for it.
        """
        if self._file.end > _MAX_FILE_BYTES:
            self._file = _SpoolFile()
        # The stride decides the order of additions, so it has to be the same when read back.
        stride = torch.empty_like(tensor, device="meta").stride()
        axes = range(tensor.dim())
        order = sorted(axes, key=stride.__getitem__, reverse=True)
        inverse = [order.index(axis) for axis in axes]
        try:
            stored = self._file.put(tensor.permute(order))
        except OSError as error:
            raise DataError(
                f"no room for the network's values in {tempfile.gettempdir()}: "
                f"{error.strerror}",
                help="set TMPDIR to a folder on a larger disk, or calibrate with a smaller "
                "--subset_len",
            ) from error
        self._since_give_back += tensor.nbytes
        if self._since_give_back > _GIVE_BACK_BYTES:
            self._since_give_back = 0
            give_back()
        return DeferredTensor(
            tensor.shape,
            tensor.dtype,
            lambda: stored.load().permute(inverse),
            stride=stride,
        )


class _SpoolFile:
    """A temporary file, which is gone with the last of its tensors."""

    def __init__(self) -> None:
        self.end = 0

    @cached_property
    def descriptor(self) -> int:
        """Open the file, which has no name where the system allows that."""
        file = tempfile.TemporaryFile(prefix="quantizer-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        return file.fileno()

    def put(self, tensor: Tensor) -> DeferredTensor:
        """Append the values of a contiguous tensor, and return it deferred."""
        start = self.end
        shape = tensor.shape
        dtype = tensor.dtype
        content = memoryview(bytes_of(tensor))
        while content:
            count = write_at(self.descriptor, content, self.end)
            content = content[count:]
            self.end += count
        return DeferredTensor(
            shape, dtype, lambda: read_tensor(self.descriptor, start, shape, dtype)
        )


def read_tensor(file: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor whose bytes begin at `start` of an open file.

    Raises:
        OSError: it cannot be read, or ends before the tensor does.
    """
    tensor = torch.empty(shape, dtype=dtype, pin_memory=_reading.is_pinned)
    content = memoryview(bytes_of(tensor))
    while content:
        count = read_into(file, content, start)
        if not count:
            raise OSError(errno.EIO, "the file was cut off while it was read")
        content = content[count:]
        start += count
    return tensor


_spool = Spool()


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor as a buffer; without a copy if it is contiguous on the
    CPU.
    """
    values = loaded(tensor.detach().cpu()).resolve_conj().resolve_neg()
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return b""
    # This needs no numpy. Files and digests take any buffer for bytes.
    buffer: Any = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    # The memory has to stay for as long as the buffer does.
    buffer.tensor = flat
    return buffer  # type: ignore[no-any-return]


def _getters(*names: str) -> set[Any]:
    """Return the functions that read these properties of a tensor."""
    return {getattr(Tensor, name).__get__ for name in names}


def _in_place_methods() -> set[Any]:
    methods: set[Any] = {
        Tensor.__setitem__,
        Tensor.data.__set__,  # type: ignore[attr-defined]
    }
    for name, method in vars(torch._C.TensorBase).items():
        if name.endswith("_") and not name.startswith("_"):
            methods.add(method)
    return methods


_FACTS = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "nbytes", "itemsize"),
    *_getters("requires_grad", "is_leaf", "grad", "grad_fn"),
    *_getters("is_meta", "is_sparse", "is_quantized", "is_cuda"),
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.__len__,
    Tensor.__hash__,
}
"""Functions that need no values."""
_SAME = {Tensor.detach, Tensor.cpu, *_getters("data")}
"""Functions whose result is the same tensor, still deferred."""
_CHANGES = _in_place_methods() - _FACTS
