"""The entropy method: the clip whose quantized histogram diverges least from the histogram (TensorRT's calibration)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.registry import register
from quantizer.observers.batch import BINS, Batch, Range
from quantizer.observers.methods import METHODS

AT_ONCE = 1 << 20  # values of one intermediate tensor


@register(METHODS, "entropy")
def entropy(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the range cut at the clip of the least Kullback-Leibler divergence; of equal ones the largest.

    For the first i bins of the magnitudes, i in 128, 160, ... 1536, 1552, ... 2048, the reference P is these bins with
    all that is beyond added to the last one; the candidate Q is the same bins merged into quant_max + 1 groups, each
    group's count spread evenly over its occupied bins. The first bin, where a ReLU's zeros are, counts as much as the
    second. Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """
    levels = min(spec.quant_max + 1, BINS)
    counts = batch.magnitudes.clone()
    counts[:, 0] = counts[:, 1]
    clips = torch.cat([torch.arange(128, 1536, 32), torch.arange(1536, BINS + 1, 16)])
    at_once = max(1, AT_ONCE // (len(clips) * levels))
    divergence = torch.cat([_divergence(part, clips, levels) for part in torch.split(counts, at_once)])
    last_minimum = len(clips) - 1 - divergence.flip(1).argmin(1)
    return batch.clipped(batch.amax * clips[last_minimum] / BINS)


def _divergence(counts: Tensor, clips: Tensor, levels: int) -> Tensor:
    """Return KL(P || Q) per row of `counts` (R, BINS) and clip, (R, clips); infinite where Q lacks a bin of P.

    With c the counts, P' = c plus the tail at bin i - 1, and m the mean of a bin's group, running sums give every term
    of KL = (sum P' log P' - sum P' log m) / sum c - log sum c + log sum_{j<i} c_j.
    """
    edges = -(-clips[:, None] * torch.arange(levels + 1) // levels)
    totals, occupied = _running(counts), _running((counts > 0).double())
    groups = totals[:, edges].diff(dim=2)
    means = groups / occupied[:, edges].diff(dim=2).clamp(min=1)
    last_group = ((clips - 1) * levels // clips).expand(len(counts), -1).unsqueeze(2)
    last_mean = means.gather(2, last_group).squeeze(2)
    inside, total, last = totals[:, clips], totals[:, -1:], counts[:, clips - 1]
    tail = total - inside
    reference = (
        _running(torch.xlogy(counts, counts))[:, clips]
        - torch.xlogy(last, last)
        + torch.xlogy(last + tail, last + tail)
    )
    cross = torch.xlogy(groups, means).sum(2) + torch.xlogy(tail, torch.where(last > 0, last_mean, 0.0))
    return ((reference - cross) / total - total.log() + inside.log()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _running(x: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ... values of each row."""
    return torch.nn.functional.pad(x.cumsum(1), (1, 0))
