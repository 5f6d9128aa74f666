"""The processes of a run: which of them takes which batch, and how they combine results."""

from quantizer.distributed.ranks import ALONE, Ranks, merge_in_batch_order, require_alike

__all__ = ["ALONE", "Ranks", "merge_in_batch_order", "require_alike"]
