"""Counts values in bins on a device, where nothing may wait for the counts."""

import torch
from torch import Tensor

_LONG_ROW = 1 << 12
"""Rows of at least so many values are counted one by one, in the fast memory of a processor.
There values of the same bin, such as the zeros of a ReLU, wait less for each other.
"""
_EXACT = 1 << 24
"""Counts in float32 are exact up to here."""


def count_bins_on_device(index: Tensor, bins: int) -> Tensor:
    """Return how many times each row of `index` (R, N) int32 has each bin, (R, bins) int64.

    `torch.bincount` would wait for the greatest index. An index that is no bin, as a value that
    is not finite may have, is counted anywhere or not at all.

    >>> count_bins_on_device(torch.tensor([[0, 2, 2]], dtype=torch.int32), 4).tolist()
    [[1, 0, 2, 0]]
    """
    rows, length = index.shape
    is_refused = torch.are_deterministic_algorithms_enabled()
    if _LONG_ROW <= length < _EXACT and not is_refused:
        counts = [torch.histc(row, bins, 0, bins) for row in index.float().unbind()]
        return torch.stack(counts).long()
    inside = index.clamp(0, bins - 1).long()
    zeros = torch.zeros(rows, bins, dtype=torch.int64, device=index.device)
    return zeros.scatter_add_(1, inside, torch.ones_like(inside))
