"""Pickle values for other ranks. Tensors are sent as bytes, without numpy; torch's own pickling
is slow for small tensors.
"""

import ctypes
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn


def pickled(value: Any) -> Tensor:
    """Return a value as a tensor of bytes."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpickled(content: Tensor, device: str) -> Any:
    """Return the value in a tensor of bytes, with tensors of a GPU on `device`."""
    unpickler = _Unpickler(_bytes_of(content), device)
    return unpickler.load()


def _bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU."""
    address = tensor.data_ptr()
    return ctypes.string_at(address, tensor.nbytes)


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its dtype, shape and bytes, and whether it is on a GPU. Tensors of
    subclasses pickle themselves.
    """

    def persistent_id(
        self, value: Any
    ) -> tuple[torch.dtype, tuple[int, ...], bytes, bool] | None:
        """Return what is pickled instead of a tensor, or None for other objects."""
        if type(value) not in (Tensor, nn.Parameter):
            return None
        tensor = value.detach().cpu().contiguous()
        return (
            tensor.dtype,
            tuple(tensor.shape),
            _bytes_of(tensor),
            value.device.type != "cpu",
        )


class _Unpickler(pickle.Unpickler):
    """Rebuilds tensors from bytes."""

    def __init__(self, content: bytes, device: str) -> None:
        super().__init__(io.BytesIO(content))
        self._device = device

    def persistent_load(self, stored: Any) -> Tensor:
        """Return the tensor of which `persistent_id` has returned `stored`."""
        dtype, shape, content, is_on_gpu = stored
        tensor = torch.empty(shape, dtype=dtype)
        if content:
            octets = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            tensor = octets.view(dtype).view(shape)
        if is_on_gpu:
            return tensor.to(self._device)
        return tensor
