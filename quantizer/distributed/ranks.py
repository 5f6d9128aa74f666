"""What a run asks of the processes it has, and the answers of a single one. Imports no
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_NONE: Any = object()


class Ranks:
    """The processes of a run, as one of them sees them; this class is a run of one process,
    with nothing to exchange.

    All ranks go through the same exchanges in the same order. `place` names one in errors.

    Attributes:
        rank: which of them this process is, from 0.
        world_size: how many there are.
    """

    rank = 0
    world_size = 1

    @property
    def is_first(self) -> bool:
        """Return whether this process is the one that writes and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Return whether there are no other processes."""
        return self.world_size == 1

    def owns(self, number: int) -> bool:
        """Return whether batch `number` of a pass is this rank's.

        >>> Ranks().owns(3)
        True
        """
        return number % self.world_size == self.rank

    def check(self) -> None:
        """Raise an error if another rank has failed; called between two units of work.

        Raises:
            RankError: one is lost.
            QuantizerError: one has stopped with this error.
        """

    def gather(self, value: T, place: str) -> list[T]:
        """Return the values of all ranks, in the order of ranks, on each of them.

        Raises:
            RankError: a rank is lost, or at another place.
        """
        return [value]

    def broadcast(self, value: T, place: str, source: int = 0) -> T:
        """Return the value of rank `source` on all ranks; other values are ignored.

        Raises:
            RankError: a rank is lost, or at another place.
        """
        return value

    def sum(self, tensor: Tensor, place: str, to: int | None = None) -> Tensor:
        """Return the sum over ranks on all of them, or on rank `to` alone, while the others
        get a tensor without values.

        Added up in float64 in the order of ranks and rounded once to the tensor's dtype, so
        that the same number of ranks gives the same bits; NaN stays NaN.

        Raises:
            RankError: a rank is lost, or at another place.
        """
        return tensor

    def by_cost(self, costs: Sequence[float]) -> list[int]:
        """Return the rank that does each piece of work.

        The most expensive pieces are shared out first, each to the rank with the least work.
        """
        load = [0.0] * self.world_size
        owners = [0] * len(costs)
        pieces = sorted(
            range(len(costs)),
            key=lambda piece: -costs[piece],
        )
        for piece in pieces:
            owner = min(range(self.world_size), key=load.__getitem__)
            owners[piece] = owner
            load[owner] += costs[piece]
        return owners


ALONE = Ranks()
"""A run of one process."""


def in_turn(lists: Iterable[Iterable[T]]) -> list[T]:
    """Return the batches of all ranks in the order of their numbers, given those of each rank.

    >>> in_turn([["0", "3", "6"], ["1", "4"], ["2", "5"]])
    ['0', '1', '2', '3', '4', '5', '6']
    """
    batches: list[T] = []
    for row in zip_longest(*lists, fillvalue=_NONE):
        batches += [batch for batch in row if batch is not _NONE]
    return batches
