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
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.world_size == 1

    def owns(self, number: int) -> bool:
        """Whether batch `number` of a pass is this rank's.

        >>> Ranks().owns(3)
        True
        """
        return number % self.world_size == self.rank

    def check(self) -> None:
        """Look after the others, between two units of work.

        Raises:
            RankError: one is lost.
            QuantizerError: one has stopped with this error.
        """

    def gather(self, value: T, place: str) -> list[T]:
        """What each rank gave, in the order of ranks, on all of them.

        Raises:
            RankError: a rank is lost, or at another place.
        """
        return [value]

    def broadcast(self, value: T, place: str, source: int = 0) -> T:
        """What rank `source` gave; what the others gave does not count.

        Raises:
            RankError: a rank is lost, or at another place.
        """
        return value

    def sum(self, tensor: Tensor, place: str, to: int | None = None) -> Tensor:
        """The sum over ranks, on all of them, or at rank `to` alone, while the others get a
        tensor without values.

        Added up in float64 in the order of ranks and rounded once to the tensor's dtype, so
        that the same number of ranks gives the same bits; NaN stays NaN.

        Raises:
            RankError: a rank is lost, or at another place.
        """
        return tensor

    def by_cost(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each piece of work: the dearest first, each to whoever has least
        to do so far.
        """
        load, owners = [0.0] * self.world_size, [0] * len(costs)
        for piece in sorted(range(len(costs)), key=lambda at: -costs[at]):
            owners[piece] = min(range(self.world_size), key=load.__getitem__)
            load[owners[piece]] += costs[piece]
        return owners


ALONE = Ranks()
"""A run of one process."""


def in_turn(lists: Iterable[Iterable[T]]) -> list[T]:
    """The batches of all ranks in the order of their numbers, given those of each rank.

    >>> in_turn([["0", "3", "6"], ["1", "4"], ["2", "5"]])
    ['0', '1', '2', '3', '4', '5', '6']
    """
    return [
        each
        for row in zip_longest(*lists, fillvalue=_NONE)
        for each in row
        if each is not _NONE
    ]
