"""The one place that seeds the global random generators, which the user's own data and models may draw from."""

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, if it is loaded, numpy's global generator."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
