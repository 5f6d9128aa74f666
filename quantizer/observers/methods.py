"""Range methods, which find the range of a batch and are rows of `tables`, and the registry of
statistics, which reduce the values of several batches to one.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median, multimode
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantizer.config.model import PAIR, QuantizationSpec
from quantizer.numerics.blocks import Kernel, fill
from quantizer.numerics.fake_quantize import FloatKernel, IntegerKernel
from quantizer.numerics.formats import PAIRS, CodeRange, FloatRange, IntegerRange
from quantizer.numerics.histogram import BINS
from quantizer.observers.observed_batch import LowHigh, ObservedValues
from quantizer.plugins import loaded
from quantizer.rows import lookup
from quantizer.tables import RANGE_METHODS, SEARCHED, listed_format

if TYPE_CHECKING:
    from quantizer.numerics.group_search import SearchedFormat

MICROEXPONENT_GROUP = PAIRS * PAIR
"""How many values share an exponent in formats with microexponents."""
CENTRES = torch.arange(-BINS, BINS, dtype=torch.float64) + 0.5
"""The centres of a histogram's bins, in widths of a bin."""
_LISTED_BITS = 8
"""The most bits of integers for which a search of scales lists all levels."""
_ENTROPY_AT_ONCE = 1 << 20
"""How many values an intermediate tensor of "entropy" has at most."""


def code_range_of(spec: QuantizationSpec) -> CodeRange:
    """Return the range of codes of a spec.

    Raises:
        ValueError: the format has no scale.

    >>> code_range_of(QuantizationSpec(bit_width=4)) == IntegerRange(-8, 7)
    True
    >>> code_range_of(QuantizationSpec(dtype="fp4", scale_type="e8m0"))
    FloatRange(dtype='fp4', scale_type='e8m0', scale_mode='floor', symmetric=True)
    """
    if not spec.is_scaled:
        raise ValueError(f'Only scaled formats have a range, and dtype is "{spec.dtype}".')
    if spec.dtype == "int":
        return IntegerRange(
            quant_min=spec.quant_min,
            quant_max=spec.quant_max,
            symmetric=spec.symmetric,
            scale_type=spec.scale_type,
            finest_position=spec.finest_position,
            symmetric_scale=spec.symmetric_scale,
        )
    return FloatRange(spec.dtype, spec.scale_type, spec.scale_mode, spec.symmetric)


def kernel_of(spec: QuantizationSpec) -> Kernel:
    """Return what rounds x / scale to codes of a spec. Equal specs have one kernel.

    >>> round_ = kernel_of(QuantizationSpec(bit_width=4)).rounder(0)
    >>> round_(torch.tensor([-9.0, 0.6])).tolist()
    [-8.0, 1.0]
    """
    if spec.dtype == "int":
        return IntegerKernel.of(spec.quant_min, spec.quant_max, spec.round_mode)
    return FloatKernel.of(spec.dtype)


def round_rows(rows: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantizationSpec) -> None:
    """Round each row in place, with a scale and a zero point of its own."""
    kernel = kernel_of(spec)
    fill(rows, rows, kernel, scale=scale, zero_point=zero_point, ch_axis=0)


def searched_format(spec: QuantizationSpec) -> SearchedFormat | None:
    """Return the levels of a spec whose scales can be searched by a weighted squared error.

    These are the formats of llama.cpp, and symmetric integers with a float scale, in groups.
    Return None for other specs.
    """
    # Only groups with searched scales need it
    from quantizer.numerics.group_search import SearchedFormat

    if spec.qscheme != "per_group" or spec.round_mode != "half_even":
        return None
    if spec.dtype in SEARCHED:
        return SearchedFormat.of(spec.dtype)
    is_short = spec.dtype == "int" and spec.bit_width <= _LISTED_BITS
    if not is_short or not spec.symmetric or spec.scale_type != "float":
        return None
    levels = range(spec.quant_min, spec.quant_max + 1)
    row = listed_format(spec.bit_width, levels)
    return SearchedFormat(row, has_signed_scale=spec.has_signed_scale)


def ranges_of(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the range that the spec's method gives each row.

    Raises:
        ValueError: there is no such method.
    """
    row = lookup(RANGE_METHODS, spec.method, "calibration method")
    ranges: LowHigh = loaded(row.function)(values, spec)
    return ranges


def axis_of(spec: QuantizationSpec) -> int | None:
    """Return the spec's `ch_axis`; None if the tensor has one scale or blocks.

    Raises:
        ValueError: the axis is missing, or microexponents have no groups.
    """
    has_groups = spec.qscheme == "per_group" and spec.group_size == MICROEXPONENT_GROUP
    if spec.scale_type == "microexponent" and not has_groups:
        raise ValueError(
            f"Microexponents need groups of {MICROEXPONENT_GROUP}, not {spec.qscheme} "
            f"{spec.group_size}."
        )
    if spec.qscheme in ("per_tensor", "per_block"):
        return None
    if spec.ch_axis is None:
        raise ValueError(f"{spec.qscheme} needs ch_axis, the axis it goes along.")
    return spec.ch_axis


def maxmin(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the exact extremes of every row."""
    return values.low, values.high


def percentile(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the range clipped to the percentile `spec.percentage` of the magnitudes.

    The limit is the left edge of the histogram's bin where the cumulative share reaches the
    percentage. For the first bin it is the right edge, so that the range is never empty. 100
    percent is the maximum itself.

    An asymmetric range is clipped at the same magnitude on both sides. So both tails together
    have (100 - percentage) percent of the values, and the outputs of a ReLU get the same upper
    limit as with a symmetric range.
    """
    if spec.percentage >= 100:
        return values.low, values.high
    share = values.magnitudes.cumsum(1) / values.magnitudes.sum(1, keepdim=True)
    wanted = share.new_full((len(share), 1), spec.percentage / 100)
    bins = torch.searchsorted(share, wanted).squeeze(1).clamp(1, BINS)
    return values.clipped(values.width * bins)


def entropy(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the range clipped where the Kullback-Leibler divergence is least. If several clips
    have the same divergence, take the largest.

    A clip keeps the first i bins of the magnitudes, with i in 128, 160, ... 1536, 1552, ...
    2048. The reference P has these bins, and the counts of all later bins are added to the last
    one. The candidate Q has the same bins in quant_max + 1 groups, with each group's count
    spread evenly over its occupied bins. The first bin, where a ReLU's zeros are, gets the
    count of the second.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """
    levels = min(spec.quant_max + 1, BINS)
    counts = values.magnitudes.clone()
    counts[:, 0] = counts[:, 1]
    coarse = torch.arange(128, 1536, 32, device=counts.device)
    fine = torch.arange(1536, BINS + 1, 16, device=counts.device)
    clips = torch.cat([coarse, fine])
    at_once = max(1, _ENTROPY_AT_ONCE // (len(clips) * levels))
    parts = torch.split(counts, at_once)
    divergence = torch.cat([_divergence(part, clips, levels) for part in parts])
    # The last of several minima
    last_minimum = len(clips) - 1 - divergence.flip(1).argmin(1)
    return values.clipped(values.width * clips[last_minimum])


def _divergence(counts: Tensor, clips: Tensor, levels: int) -> Tensor:
    """Return KL(P || Q) for each row of `counts` (R, BINS) and each clip, (R, clips).

    It is infinite if Q has no counts in a bin of P. Let c be the counts, P' the first i counts
    with the tail added to the last, and m the mean of a bin's group. Then KL = (sum P' log P' -
    sum P' log m) / sum c - log sum c + log sum_{j<i} c_j, and each term is a difference of
    running sums.
    """
    edges = -(-clips[:, None] * torch.arange(levels + 1, device=clips.device) // levels)
    totals = _running(counts)
    occupied = _running((counts > 0).double())
    groups = totals[:, edges].diff(dim=2)
    means = groups / occupied[:, edges].diff(dim=2).clamp(min=1)
    last_group = ((clips - 1) * levels // clips).expand(len(counts), -1).unsqueeze(2)
    last_mean = means.gather(2, last_group).squeeze(2)
    total = totals[:, -1:]
    inside = totals[:, clips]
    tail = total - inside
    last = counts[:, clips - 1]
    # sum P' log P': the last bin has the tail added
    inside_entropy = _running(torch.xlogy(counts, counts))[:, clips]
    entropies = inside_entropy - torch.xlogy(last, last) + torch.xlogy(last + tail, last + tail)
    # sum P' log m: the tail falls into the last group
    tail_mean = torch.where(last > 0, last_mean, 0.0)
    cross_entropies = torch.xlogy(groups, means).sum(2) + torch.xlogy(tail, tail_mean)
    divergence = (entropies - cross_entropies) / total - total.log() + inside.log()
    return divergence.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _running(x: Tensor) -> Tensor:
    """Return the running sums of each row, beginning with 0."""
    return torch.nn.functional.pad(x.cumsum(1), (1, 0))


def modal(values: list[float]) -> float:
    """Return the most frequent value. Of equally frequent ones, return the largest: the largest
    scale clips least.

    >>> modal([0.25, 0.5, 0.5, 0.25, 0.125])
    0.5
    """
    return max(multimode(values))


BATCH_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "modal": modal,
    "max": max,
    # It sums exactly, so the order of the batches does not matter
    "mean": fmean,
    "median": median,
}


def reduce_batches(values: Tensor, name: str) -> Tensor:
    """Return the statistic `name` of each column of `values` (batches, R) as (R,) float64.

    Raises:
        ValueError: there is no such statistic.

    >>> reduce_batches(torch.tensor([[1.0], [2.0], [6.0]]), "mean").tolist()
    [3.0]
    """
    statistic = lookup(BATCH_STATISTICS, name, "statistic over batches")
    if len(values) == 1:
        return values[0].double()
    columns = values.T.tolist()
    return torch.tensor([statistic(column) for column in columns], dtype=torch.float64)
