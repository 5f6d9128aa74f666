"""The processes of a run: which of them takes which batch, and how they combine results."""

from quantizer.distributed.alike import require_alike
from quantizer.distributed.ranks import ALONE, Ranks, merge_in_batch_order

__all__ = ["ALONE", "Ranks", "merge_in_batch_order", "require_alike"]
