"""Keeps one warning of torch from users: that an LSTM with projections runs without oneDNN,
which changes no result.
"""

import warnings
from functools import cache

import torch
from torch import nn

_MESSAGE = "LSTM with projections is not supported with oneDNN"


def keep_quiet_about(module: nn.Module) -> None:
    """See to it that torch says nothing where a module has LSTMs with projections."""
    if any(isinstance(part, nn.LSTM) and part.proj_size for part in module.modules()):
        spend_warning()


@cache
def spend_warning() -> None:
    """Have torch give the warning where nobody sees it: it gives it once in a process, by
    operators of C++ past the filters of Python.
    """
    # The weights are drawn, and the user's generator stays as it is.
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message=_MESSAGE)
        layer = nn.LSTM(1, 2, proj_size=1, device="cpu", dtype=torch.float32)
        layer(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))
