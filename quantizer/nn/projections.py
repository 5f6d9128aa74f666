"""Suppress a warning of torch: that an LSTM with projections runs without oneDNN, which changes
no result.
"""

import warnings
from functools import cache

import torch
from torch import nn

_MESSAGE = "LSTM with projections is not supported with oneDNN"


def keep_quiet_about(module: nn.Module) -> None:
    """Suppress the warning if a module has LSTMs with projections."""
    for part in module.modules():
        if isinstance(part, nn.LSTM) and part.proj_size:
            spend_warning()


@cache
def spend_warning() -> None:
    """Trigger the warning where it is ignored.

    Operators in C++ emit it past Python's filters, but only once in a process.
    """
    # The weights are random, and the user's generator must not change
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message=_MESSAGE)
        layer = nn.LSTM(1, 2, proj_size=1, device="cpu", dtype=torch.float32)
        layer(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))
