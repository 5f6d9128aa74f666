"""The values of a network for all batches at once, in memory up to a budget, beyond that in files that vanish."""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer import memory
from quantizer.numerics.deferred import DeferredTensor, Spool

UNKNOWN = 2 << 30  # bytes, where the system does not say what is free


def half_of_what_is_free() -> int:
    """The budget of a store that is given none."""
    free = memory.available()
    return UNKNOWN if free is None else free // 2


class ActivationStore:
    """Keeps nested values; tensors beyond `budget` bytes are read from a file whenever they are needed.

    A view counts as memory of its own. Tensors on another device than the CPU stay there.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = half_of_what_is_free() if budget is None else budget
        self._left = self.budget
        self._spool = Spool()

    def keep(self, value: Any) -> Any:
        """The same value, its tensors where they fit; the caller uses this one from now on.

        Raises:
            DataError: there is no room for the files.
        """
        return pytree.tree_map(lambda leaf: self._keep(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def free(self, value: Any) -> None:
        """The value is no longer used: its memory is there for others."""
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DeferredTensor):
                self._left += leaf.nbytes

    def _keep(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeferredTensor):
            return tensor
        if tensor.nbytes <= self._left or tensor.device.type != "cpu" or not tensor.numel():
            self._left -= tensor.nbytes
            return tensor
        return self._spool.put(tensor)
