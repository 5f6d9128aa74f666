"""Compares what decides a result between the ranks of a run, before anything is computed."""

from collections.abc import Mapping
from typing import Any

from quantizer.distributed.ranks import Ranks
from quantizer.errors import RankError

HELP = "start all ranks with the same versions, options, config, model and weights"


def require_alike(ranks: Ranks, facts: Mapping[str, Any], place: str) -> None:
    """Refuse a run whose ranks would not compute the same, on all ranks alike.

    Args:
        ranks: the processes of the run.
        facts: what decides the result, by a word for it; of a mapping the first entry that
            differs is named.
        place: names the exchange in errors.

    Raises:
        RankError: naming the first rank that differs from rank 0, and in what.
    """
    rows = ranks.gather(dict(facts), place)
    first = rows[0]
    for rank, row in enumerate(rows):
        for word in first:
            if row.get(word) != first[word]:
                what = _difference(word, first[word], row.get(word))
                raise RankError(f"rank {rank} differs from rank 0: {what}", help=HELP)


def _difference(word: str, first: Any, other: Any) -> str:
    if not isinstance(first, Mapping) or not isinstance(other, Mapping):
        return f"{word} is {other}, not {first}"
    names = [*first, *(name for name in other if name not in first)]
    differing = next(name for name in names if first.get(name) != other.get(name))
    return f"{word} {differing}"
