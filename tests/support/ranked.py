"""A network with an operator that engines for phones lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.errors import UsageError


class Ranked(nn.Module):
    """Sorts the values of a linear layer, and takes the largest ones of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).topk(3).values.sort().values


def require_sort_is_refused(target: str, compiler: str, reason: str, folder: Path) -> None:
    """The refusal names the layer that sorts, not the one with `topk`, and the compiler's reason."""
    data = [torch.randn(4, 8) for _ in range(2)]
    sentence = f"Ranked/sort computes sort, which {compiler} does not know: {reason}"
    with pytest.raises(UsageError, match=sentence):
        quantizer.quantize(Ranked(), data, to=target, folder=folder)
