"""The values of a network for all batches at once, in memory up to a budget, beyond that in files that vanish."""

import contextlib
import os
import tempfile
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import DataError

BUDGET = 2 << 30  # bytes of values kept in memory


class ActivationStore:
    """Keeps nested values; tensors beyond `budget` bytes are mapped from files that have no name any more.

    A view counts as memory of its own, but a mapped tensor is not mapped again. Tensors on another device than the CPU
    stay there.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._left = budget
        self._mapped: Counter[int] = Counter()  # how often each address is kept

    def keep(self, value: Any) -> Any:
        """The same value, its tensors where they fit; the caller uses this one from now on.

        Raises:
            DataError: there is no room for the files.
        """
        return pytree.tree_map(lambda leaf: self._keep(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def free(self, value: Any) -> None:
        """The value is no longer used: its memory is there for others."""
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            address = leaf.data_ptr()
            if address in self._mapped:
                self._mapped[address] -= 1
                self._mapped += Counter()  # forgets what is kept no more: the address may be used again
            else:
                self._left += leaf.nbytes

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._mapped:
            if tensor.nbytes <= self._left or tensor.device.type != "cpu":
                self._left -= tensor.nbytes
                return tensor
            tensor = _mapped(tensor)
        self._mapped[tensor.data_ptr()] += 1
        return tensor


def _mapped(tensor: Tensor) -> Tensor:
    """A copy whose memory the operating system may write out."""
    handle, name = tempfile.mkstemp(prefix="quantizer-")
    try:
        if hasattr(os, "posix_fallocate"):  # a disk that fills up under a mapped file would kill the process
            os.posix_fallocate(handle, 0, tensor.nbytes)
        flat = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError as error:
        raise DataError(
            f"no room for the network's values in {os.path.dirname(name)}: {error.strerror}",
            help="set TMPDIR to a folder on a larger disk, or calibrate with a smaller --subset_len",
        ) from error
    finally:
        os.close(handle)
        with contextlib.suppress(PermissionError):  # Windows keeps a file while it is mapped
            os.unlink(name)
    strides = torch.empty_like(tensor, device="meta").stride()  # the layout decides the order of additions
    return flat.as_strided(tensor.shape, strides).copy_(tensor)
