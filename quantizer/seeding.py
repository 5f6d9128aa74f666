"""Seed the global random generators, which the user's data and models may use."""

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, if it is loaded, numpy's global generator."""
    random.seed(seed)
    # It asks only what torch was built for: looking for devices would break forks
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)
    else:
        # torch.manual_seed would store a traceback for devices that may come later
        torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
