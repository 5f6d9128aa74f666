"""The statistics over batches: many values of one scale become one. None depends on the order of the batches."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median, multimode

import torch
from torch import Tensor

from quantizer.numerics.registry import lookup

Statistic = Callable[[list[float]], float]


def modal(values: list[float]) -> float:
    """Return the most frequent value; of equally frequent ones the largest, the coarser scale, which clips least.

    >>> modal([0.25, 0.5, 0.5, 0.25, 0.125])
    0.5
    """
    return max(multimode(values))


STATISTICS: dict[str, Statistic] = {
    "modal": modal,
    "max": max,
    "mean": fmean,  # sums exactly, so the order of the batches cannot show
    "median": median,
}


def reduce_batches(values: Tensor, name: str) -> Tensor:
    """Return the statistic `name` of each column of `values` (batches, R) as (R,) float64.

    Raises ValueError for an unknown name.

    >>> reduce_batches(torch.tensor([[1.0], [2.0], [6.0]]), "mean").tolist()
    [3.0]
    """
    statistic = lookup(STATISTICS, name, "statistic over batches")
    if len(values) == 1:
        return values[0].double()
    return torch.tensor([statistic(column) for column in values.T.tolist()], dtype=torch.float64)
