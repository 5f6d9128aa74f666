"""Compare versions, options, config and weights between the ranks of a run, before it computes
anything.
"""

from collections.abc import Mapping
from typing import Any

from quantizer.distributed.ranks import Ranks
from quantizer.errors import RankError


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
