"""The processes of a run: they share batches, combine results, and check that all are alike.
Here is the interface, and its implementation for a single process. It does not import
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from quantizer.errors import RankError

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_NONE: Any = object()


class Ranks:
    """The processes of a run, as seen by one of them. This class is for a run of one process,
    with nothing to exchange.

    All ranks run the same exchanges in the same order. `place` names an exchange in errors.

    Attributes:
        rank: the number of this process, from 0.
        world_size: the number of processes.
    """

    rank = 0
    world_size = 1

    @property
    def is_first(self) -> bool:
        """Return whether this process writes and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Return whether there are no other processes."""
        return self.world_size == 1

    def owns(self, number: int) -> bool:
        """Return whether batch `number` of a pass belongs to this rank.

        >>> Ranks().owns(3)
        True
        """
        return number % self.world_size == self.rank

    def check(self) -> None:
        """Check that no other rank has failed. It is called between two units of work.

        Raises:
            RankError: a rank is lost.
            QuantizerError: a rank has stopped with this error.
        """

    def gather(self, value: _T, place: str) -> list[_T]:
        """Return on each rank the values of all ranks, in the order of ranks.

        Raises:
            RankError: a rank is lost, or is at another exchange.
        """
        return [value]

    def broadcast(self, value: _T, place: str, source: int = 0) -> _T:
        """Return on each rank the value of rank `source`.

        Raises:
            RankError: a rank is lost, or is at another exchange.
        """
        return value

    def sum(self, tensor: Tensor, place: str, to: int | None = None) -> Tensor:
        """Return the sum over ranks.

        With `to`, only that rank gets it, and the others an empty tensor. The sum is computed
        in float64 in the order of ranks and rounded once to the tensor's dtype, so that the
        same number of ranks gives the same bits. NaN stays NaN.

        Raises:
            RankError: a rank is lost, or is at another exchange.
        """
        return tensor

    def by_cost(self, costs: Sequence[float]) -> list[int]:
        """Return the rank of each piece of work, whose costs are in any unit.

        The most expensive pieces are assigned first, each to the rank with the least work.
        """
        load = [0.0] * self.world_size
        owners = [0] * len(costs)
        pieces = sorted(range(len(costs)), key=lambda piece: -costs[piece])
        for piece in pieces:
            owner = min(range(self.world_size), key=load.__getitem__)
            owners[piece] = owner
            load[owner] += costs[piece]
        return owners


ALONE = Ranks()
"""A run of one process."""


def merge_in_batch_order(lists: Iterable[Iterable[_T]]) -> list[_T]:
    """Merge lists with something for each of a rank's batches into one in the order of batches.

    Batch 0 is the first of rank 0, batch 1 the first of rank 1, and so on.

    >>> merge_in_batch_order([["0", "3", "6"], ["1", "4"], ["2", "5"]])
    ['0', '1', '2', '3', '4', '5', '6']
    """
    batches: list[_T] = []
    for row in zip_longest(*lists, fillvalue=_NONE):
        batches += [batch for batch in row if batch is not _NONE]
    return batches


def require_alike(ranks: Ranks, facts: Mapping[str, Any], place: str) -> None:
    """Check on all ranks that they would compute the same.

    Args:
        ranks: the processes of the run.
        facts: everything that the result depends on, by name. If a mapping differs, its first
            entry that differs is named.
        place: names the exchange in errors.

    Raises:
        RankError: naming the first rank that differs from rank 0, and the difference.
    """
    rows = ranks.gather(dict(facts), place)
    first = rows[0]
    for rank, row in enumerate(rows):
        for name, value in first.items():
            other = row.get(name)
            if other == value:
                continue
            difference = _difference(name, value, other)
            raise RankError(
                f"rank {rank} differs from rank 0: {difference}",
                help="start all ranks with the same versions, options, config, model and "
                "weights",
            )


def _difference(name: str, first: Any, other: Any) -> str:
    """Return what differs, as the end of a sentence."""
    if not isinstance(first, Mapping) or not isinstance(other, Mapping):
        return f"{name} is {other}, not {first}"
    keys = list(first)
    keys += [key for key in other if key not in first]
    for key in keys:
        if first.get(key) != other.get(key):
            return f"{name} {key}"
    return name
