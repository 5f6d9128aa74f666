"""The one place that seeds the global random generators, which the user's own data and models
may draw from.
"""

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, if it is loaded, numpy's global generator."""
    random.seed(seed)
    # Built for one; asking for devices would hinder forks.
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)
    else:
        # The same for the CPU. With each call the other function keeps a traceback, for devices
        # that might still come.
        torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
