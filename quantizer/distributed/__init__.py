"""The processes of one run: who takes which batch, and how what they find comes together."""

from quantizer.distributed.alike import require_alike
from quantizer.distributed.ranks import ALONE, Ranks, in_turn

__all__ = ["ALONE", "Ranks", "in_turn", "require_alike"]
