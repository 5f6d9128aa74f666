"""Store the values of a network for all batches: in memory up to a budget, and beyond that in
temporary files.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.storage import process_memory
from quantizer.storage.deferred_tensor import CPU, DeferredTensor, Spool

_BYTES_IF_UNKNOWN = 2 << 30
"""The budget where the system does not say what is free."""


def half_of_what_is_free(device: torch.device = CPU) -> int:
    """Return the default budget for what is on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    free = process_memory.available_bytes()
    return _BYTES_IF_UNKNOWN if free is None else free // 2


class ActivationStore:
    """Keeps nested values. Tensors beyond `budget` bytes are read from a file whenever they are
    needed, and put on their device again.

    Each device has a budget of its own. Without one it is half of what is free there. A view
    counts as memory of its own.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._left: dict[torch.device, int] = {}
        self._spool = Spool()

    def keep(self, value: Any) -> Any:
        """Return the same value, with its tensors where they fit. The caller uses this one from
        now on.

        Raises:
            DataError: there is no room for the files.
        """
        return pytree.tree_map(self._keep, value)

    def free(self, value: Any) -> None:
        """Give back the memory of a value that is no longer used."""
        for leaf in pytree.tree_leaves(value):
            is_in_memory = isinstance(leaf, Tensor) and not isinstance(leaf, DeferredTensor)
            if is_in_memory and leaf.device in self._left:
                self._left[leaf.device] += leaf.nbytes

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DeferredTensor):
            return leaf
        device = leaf.device
        if device not in self._left:
            budget = half_of_what_is_free(device) if self.budget is None else self.budget
            self._left[device] = budget
        if leaf.nbytes > self._left[device] and leaf.numel():
            return self._spool.put(leaf).on_device(device)
        self._left[device] -= leaf.nbytes
        return leaf
