"""The values of a network for all batches at once, in memory up to a budget, beyond that in files that vanish."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

BUDGET = 2 << 30  # bytes of values kept in memory


class Shelf:
    """Keeps nested values; tensors beyond `budget` bytes are mapped from files that have no name any more.

    A view counts as memory of its own. Tensors on another device than the CPU stay there.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._left = budget
        self._mapped: set[int] = set()  # addresses

    def keep(self, value: Any) -> Any:
        """The same value, its tensors where they fit; the caller uses this one from now on."""
        return pytree.tree_map(lambda leaf: self._keep(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def free(self, value: Any) -> None:
        """The value is no longer used: its memory is there for others."""
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                if leaf.data_ptr() in self._mapped:
                    self._mapped.remove(leaf.data_ptr())
                else:
                    self._left += leaf.nbytes

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes <= self._left or tensor.device.type != "cpu":
            self._left -= tensor.nbytes
            return tensor
        mapped = _mapped(tensor)
        self._mapped.add(mapped.data_ptr())
        return mapped


def _mapped(tensor: Tensor) -> Tensor:
    """A copy whose memory the operating system may write out."""
    handle, name = tempfile.mkstemp(prefix="quantizer-")
    os.close(handle)
    flat = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    with contextlib.suppress(PermissionError):  # Windows keeps a file while it is mapped
        os.unlink(name)
    strides = torch.empty_like(tensor, device="meta").stride()  # the layout decides the order of additions
    return flat.as_strided(tensor.shape, strides).copy_(tensor)
