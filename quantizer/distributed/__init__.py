"""The processes of a run: which of them takes which batch, and how they combine results."""

from quantizer.distributed.alike import require_alike
from quantizer.distributed.ranks import (
    ALONE,
    Ranks,
    in_turn,
)

__all__ = [
    "ALONE",
    "Ranks",
    "in_turn",
    "require_alike",
]
