"""Tensors whose values are read from files, or made of codes, when an operator needs them."""

from __future__ import annotations

import ctypes
import os
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
from quantizer.storage.process_memory import kept_after_moves, trim_heap
from quantizer.storage.system_calls import BytesInFile, read_some, write_at

CPU = torch.device("cpu")
_reader = ThreadPoolExecutor(1, "prefetch")


class _ThreadState(threading.local):
    """How the current thread reads.

    Attributes:
        is_pinned: whether into pinned memory, from which a GPU copies faster.
    """

    is_pinned = False


_thread_state = _ThreadState()


@dataclass
class _LoadedValues:
    """The values of a deferred tensor, which stay in memory inside `keep_loaded`.

    Attributes:
        users: the number of `with` blocks that keep them.
        values: None until the first of these blocks has loaded them.
    """

    users: int = 0
    values: Tensor | None = None


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
        place: of the bytes of the values, if these are in a file as they are in memory.

    >>> ones = DeferredTensor((2, 3), torch.float32, lambda: torch.ones(2, 3))
    >>> ones.shape, (ones + 1).sum()
    (torch.Size([2, 3]), tensor(12.))
    """

    _read: Callable[[], Tensor]
    place: BytesInFile | None
    _prefetched: Future[Tensor] | None = None
    _loaded: _LoadedValues

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        load: Callable[[], Tensor],
        device: torch.device = CPU,
        *,
        stride: Sequence[int] | None = None,
        place: BytesInFile | None = None,
    ) -> DeferredTensor:
        tensor: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, tuple(shape), stride, dtype=dtype, device=device
        )
        tensor._read = load
        tensor.place = place
        tensor._loaded = _LoadedValues()
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def load(self) -> Tensor:
        """Return the values on the tensor's device. Inside `keep_loaded`, each call returns the
        same object.
        """
        if self._loaded.values is not None:
            return self._loaded.values
        prefetched = self._prefetched
        self._prefetched = None
        if prefetched is None:
            values = self._read_for_device()
        else:
            values = prefetched.result()
        values = values.to(self.device)
        if self._loaded.users:
            self._loaded.values = values
        return values

    def prefetch(self) -> None:
        """Begin to read the values for the next `load` in a thread.

        If the thread raises an error, the next `load` raises it.
        """
        if self._prefetched is None and self._loaded.values is None:
            self._prefetched = _reader.submit(self._read_for_device)

    def _read_for_device(self) -> Tensor:
        """Return the values on the CPU, in pinned memory if the tensor is on a GPU."""
        was_pinned = _thread_state.is_pinned
        # `_read` may load another deferred tensor, which has to be pinned as well
        _thread_state.is_pinned = was_pinned or self.device.type == "cuda"
        try:
            return self._read()
        finally:
            _thread_state.is_pinned = was_pinned

    def on_device(self, device: torch.device) -> DeferredTensor:
        """Return the tensor on a device, still deferred."""
        other = DeferredTensor(
            self.shape, self.dtype, self._read, device, stride=self.stride(), place=self.place
        )
        if device == self.device:
            other._loaded = self._loaded
        return other

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pass the values to another process, which puts them into a file of its own."""
        return move_to_disk, (self.load(),)

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
        """Run a function of torch: without loading if it needs no values, else on the loaded
        tensors.
        """
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        # Otherwise each call below would end here again
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_VALUES:
                return func(*args, **kwargs)
            if func is Tensor.to and _is_move_to_meta(args[1:], kwargs):
                return torch.empty_strided(
                    first.shape, first.stride(), dtype=first.dtype, device="meta"
                )
            if isinstance(first, DeferredTensor) and func in _STAYS_DEFERRED:
                device = CPU if func is Tensor.cpu else first.device
                return first.on_device(device)
            if isinstance(first, DeferredTensor) and func in _IN_PLACE:
                raise ChangedInPlaceError("A deferred tensor cannot be changed in place.")
            return func(*loaded(args), **loaded(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator that C++ code calls, on the loaded tensors."""
        return func(*loaded(args), **loaded(kwargs or {}))


def _is_move_to_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the meta device is the only argument of a call of `Tensor.to`."""
    values = [*args, *kwargs.values()]
    if len(values) != 1 or not isinstance(values[0], (str, torch.device)):
        return False
    return torch.device(values[0]).type == "meta"


@contextmanager
def keep_loaded(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Load deferred tensors at most once inside the `with` block, and keep their values until
    its end.
    """
    states = [tensor._loaded for tensor in tensors if isinstance(tensor, DeferredTensor)]
    for state in states:
        state.users += 1
    try:
        yield
    finally:
        for state in states:
            state.users -= 1
            if not state.users:
                state.values = None


def loaded(value: Any) -> Any:
    """Return a nested value with ordinary tensors instead of deferred ones."""
    return pytree.tree_map_only(DeferredTensor, lambda tensor: tensor.load(), value)


def deferred_like(source: Tensor, result: Tensor) -> Tensor:
    """Return `result`, which was computed from `source`. If `source` is deferred, the values of
    `result` are moved to a temporary file, so that it takes no memory either.

    Raises:
        DataError: the disk has no room for it.
    """
    if isinstance(source, DeferredTensor):
        return move_to_disk(result)
    return result


def apply_deferred(
    source: Tensor, shape: Sequence[int], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `change(source)`. If `source` is deferred, so is the result: `change` runs each
    time that its values are loaded.

    Args:
        source: the argument of `change`.
        shape: of the result.
        change: returns a tensor of the dtype of `source`.
    """
    if not isinstance(source, DeferredTensor):
        return change(source)
    return DeferredTensor(shape, source.dtype, lambda: change(source.load()), source.device)


def move_to_disk(tensor: Tensor) -> Tensor:
    """Return a deferred tensor with the same values in a temporary file.

    Empty tensors are returned as they are, and so are tensors on a GPU of whose memory half is
    free. A tensor on the meta device becomes deferred without a file.

    Raises:
        DataError: the disk has no room for it.
    """
    if isinstance(tensor, DeferredTensor) or not tensor.numel():
        return tensor
    if tensor.is_cuda:
        free, total = torch.cuda.mem_get_info(tensor.device)
        if 2 * free > total:
            return tensor
    if tensor.is_meta:
        return DeferredTensor(
            tensor.shape, tensor.dtype, lambda: tensor, tensor.device, stride=tensor.stride()
        )
    return _spool.put(tensor).on_device(tensor.device)


_MAX_FILE_BYTES = 1 << 28
"""Once a file is larger, the next tensor begins a new one. The system frees a file's disk space
when the last of its tensors is gone, so one large file would keep it longer.
"""
_TRIM_BYTES = 1 << 24
"""Bytes that are moved to disk between two calls of `trim_heap`."""


class Spool:
    """Moves tensors from memory into temporary files."""

    def __init__(self) -> None:
        self.begin_file()
        self._bytes_since_trim = 0

    def begin_file(self) -> None:
        """Write the next tensors to another file."""
        self._file = _SpoolFile()

    def put(self, tensor: Tensor) -> DeferredTensor:
        """Write a tensor, and return a deferred one with the same values and stride.

        Raises:
            DataError: the disk has no room for it.
        """
        if self._file.end > _MAX_FILE_BYTES:
            self.begin_file()
        # Kernels add up values in the order of the strides. To get the same sums later, the
        # tensor is written in the order of its memory, and permuted back after reading.
        stride = torch.empty_like(tensor, device="meta").stride()
        axes = range(tensor.dim())
        order = sorted(axes, key=stride.__getitem__, reverse=True)
        inverse = [order.index(axis) for axis in axes]
        try:
            read = self._file.put(tensor.permute(order))
        except OSError as error:
            raise DataError(
                f"cannot write values of the network to {tempfile.gettempdir()}: "
                f"{error.strerror}",
                help="set TMPDIR to a folder on a larger disk, or calibrate with a smaller "
                "<--subset_len>",
            ) from error
        self._bytes_since_trim += tensor.nbytes
        if self._bytes_since_trim > _TRIM_BYTES:
            self._bytes_since_trim = 0
            trim_heap(kept_after_moves())
        return DeferredTensor(
            tensor.shape, tensor.dtype, lambda: read().permute(inverse), stride=stride
        )


class _SpoolFile:
    """A temporary file. It is removed with its last tensor, whose `load` refers to it."""

    def __init__(self) -> None:
        self.end = 0

    @cached_property
    def descriptor(self) -> int:
        """Open the file. On POSIX systems it has no name, so that a kill leaves nothing."""
        file = tempfile.TemporaryFile(prefix="quantizer-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        return file.fileno()

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Append the values of a contiguous tensor, and return a function that reads them."""
        start = self.end
        shape = tensor.shape
        dtype = tensor.dtype
        content = memoryview(bytes_of(tensor))
        while content:
            count = write_at(self.descriptor, content, self.end)
            content = content[count:]
            self.end += count
        return lambda: read_tensor(self.descriptor, start, shape, dtype)


def read_tensor(file: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor whose bytes begin at `start` of an open file.

    Raises:
        OSError: it cannot be read, or ends before the tensor does.
    """
    tensor = torch.empty(shape, dtype=dtype, pin_memory=_thread_state.is_pinned)
    content = memoryview(bytes_of(tensor))
    while content:
        count = read_some(file, content, start)
        content = content[count:]
        start += count
    return tensor


_spool = Spool()
if hasattr(os, "register_at_fork"):
    # A forked process would write over the tensors of its parent
    os.register_at_fork(after_in_child=_spool.begin_file)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor as a buffer; without a copy if it is contiguous on the
    CPU.
    """
    values = loaded(tensor.detach().cpu()).resolve_conj().resolve_neg()
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return b""
    # Files and digests take any buffer for bytes. A ctypes array is one without numpy.
    buffer: Any = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    # The array does not own the memory. This reference keeps it for as long as the array lives.
    buffer.tensor = flat
    return buffer  # type: ignore[no-any-return]


def _getters(*names: str) -> set[Any]:
    """Return the functions that torch calls to read these properties of a tensor."""
    return {getattr(Tensor, name).__get__ for name in names}


def _in_place_methods() -> set[Any]:
    """Return the methods that change a tensor. By torch's convention their names end in `_`."""
    methods: set[Any] = {
        Tensor.__setitem__,
        Tensor.data.__set__,  # type: ignore[attr-defined]
    }
    for name, method in vars(torch._C.TensorBase).items():
        if name.endswith("_") and not name.startswith("_"):
            methods.add(method)
    return methods


_WITHOUT_VALUES = {
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
_STAYS_DEFERRED = {Tensor.detach, Tensor.cpu, Tensor.resolve_neg, *_getters("data")}
"""Functions whose result is the same tensor, still deferred. `load` returns no negated view."""
_IN_PLACE = _in_place_methods() - _WITHOUT_VALUES


class ChangedInPlaceError(RuntimeError):
    """Code has tried to change a deferred tensor, such as the weight of a layer, in place."""
