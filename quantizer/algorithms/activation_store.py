"""The values of a network for all batches at once, in memory up to a budget, beyond that in
files that vanish.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.storage import process_memory
from quantizer.storage.deferred_tensor import CPU, DeferredTensor, Spool

UNKNOWN = 2 << 30  # bytes, where the system does not say what is free


def half_of_what_is_free(device: torch.device = CPU) -> int:
    """The budget of a store that is given none, for what is on a device."""
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else process_memory.available()
    )
    return UNKNOWN if free is None else free // 2


class ActivationStore:
    """Keeps nested values; tensors beyond `budget` bytes are read from a file whenever they are
    needed, and put on their device again. Each device has a budget of its own; without one it
    is half of what is free there.

    A view counts as memory of its own.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._left: dict[torch.device, int] = {}
        self._spool = Spool()

    def keep(self, value: Any) -> Any:
        """The same value, its tensors where they fit; the caller uses this one from now on.

        Raises:
            DataError: there is no room for the files.
        """
        return pytree.tree_map(
            lambda leaf: self._keep(leaf) if isinstance(leaf, Tensor) else leaf, value
        )

    def free(self, value: Any) -> None:
        """The value is no longer used: its memory is there for others."""
        for leaf in pytree.tree_leaves(value):
            if (
                isinstance(leaf, Tensor)
                and not isinstance(leaf, DeferredTensor)
                and leaf.device in self._left
            ):
                self._left[leaf.device] += leaf.nbytes

    def _keep(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeferredTensor):
            return tensor
        device = tensor.device
        if device not in self._left:
            self._left[device] = (
                half_of_what_is_free(device) if self.budget is None else self.budget
            )
        if tensor.nbytes > self._left[device] and tensor.numel():
            return self._spool.put(tensor).at(device)
        self._left[device] -= tensor.nbytes
        return tensor
