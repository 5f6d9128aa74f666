"""The registries: range methods, from the values of a batch to a range, and statistics, from
batches to one value.
"""

from collections.abc import Callable
from statistics import fmean, median, multimode

import torch
from torch import Tensor

from quantizer.config.model import PAIR, QuantizationSpec
from quantizer.numerics.blocks import Kernel, fill
from quantizer.numerics.fake_quantize import float_kernel, integer_kernel
from quantizer.numerics.histogram import BINS
from quantizer.numerics.qparams import (
    CodeRange,
    FloatRange,
    IntegerRange,
    qparams_from_range,
)
from quantizer.numerics.registry import lookup, register
from quantizer.numerics.two_level import PAIRS
from quantizer.observers.observed_batch import Distribution, ObservedBatch, Range

Statistic = Callable[[list[float]], float]
RangeMethod = Callable[[Distribution, QuantizationSpec], Range]
METHODS: dict[str, RangeMethod] = {}
MICROEXPONENT_GROUP = PAIRS * PAIR
INTEGER_ONLY = frozenset({"entropy", "diffs"})
"""Methods that are about integer codes: levels to merge bins into, positions of a binary
point.
"""
OF_VALUES = frozenset({"maxmin", "diffs"})
"""Methods that read no histogram; all others need nothing else of a batch, so they can do many
in one go.
"""
CENTRES = torch.arange(-BINS, BINS, dtype=torch.float64) + 0.5
DIFFS_SAMPLE = 1 << 15  # every value is quantized five times, and the candidates lie far apart
# The scale that cuts nothing off, and its half, quarter, ...: five in all, as in pytorch_nndct
DIFFS_CANDIDATES = 5
ENTROPY_AT_ONCE = 1 << 20  # values of one intermediate tensor


def code_range_of(spec: QuantizationSpec) -> CodeRange:
    """Return the codes that `spec` scales to.

    Raises:
        ValueError: there are none, as for formats without a scale.

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
    """Return what makes codes of `spec` of x / scale.

    >>> import torch
    >>> kernel_of(QuantizationSpec(bit_width=4))(0)(torch.tensor([-9.0, 0.6])).tolist()
    [-8.0, 1.0]
    """
    if spec.dtype == "int":
        return integer_kernel(spec.quant_min, spec.quant_max, spec.round_mode)
    return float_kernel(spec.dtype)


def axis_of(spec: QuantizationSpec) -> int | None:
    """Return the axis that scales go with, None for one scale in all.

    Raises:
        ValueError: the axis is missing, or microexponents have no groups.
    """
    if spec.scale_type == "microexponent" and (spec.qscheme, spec.group_size) != (
        "per_group",
        MICROEXPONENT_GROUP,
    ):
        raise ValueError(
            f"Microexponents need groups of {MICROEXPONENT_GROUP}, not {spec.qscheme} "
            f"{spec.group_size}."
        )
    if spec.qscheme == "per_tensor":
        return None
    if spec.ch_axis is None:
        raise ValueError(f"{spec.qscheme} needs ch_axis, the axis it goes along.")
    return spec.ch_axis


@register(METHODS, "maxmin")
def maxmin(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the exact extremes of every row."""
    return values.low, values.high


@register(METHODS, "percentile")
def percentile(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the range cut at the magnitude below which `spec.percentage` percent of the values
    lie.

    The magnitude is the left edge of the histogram's bin where the cumulative share gets there
    (of the first bin the right edge, so that the range is never empty); 100 percent is the
    maximum itself. An asymmetric range is cut at the same magnitude on both sides: (100 -
    percentage) percent is cut off in all, shared by the two tails as the data has them, and
    one-sided data such as a ReLU's is treated as symmetric.
    """
    if spec.percentage >= 100:
        return values.low, values.high
    share = values.magnitudes.cumsum(1) / values.magnitudes.sum(1, keepdim=True)
    wanted = torch.full((len(share), 1), spec.percentage / 100, dtype=torch.float64)
    bins = torch.searchsorted(share, wanted).squeeze(1).clamp(1, BINS)
    return values.clipped(values.width * bins)


@register(METHODS, "diffs")
def diffs(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the range halved as often (0 to 4 times) as the squared error falls; of equal
    errors the widest range.
    """
    # An observer of all batches together refuses the method
    assert isinstance(values, ObservedBatch)
    code_range, sample = code_range_of(spec), values.sample(DIFFS_SAMPLE)
    factors = 0.5 ** torch.arange(DIFFS_CANDIDATES, dtype=torch.float64)
    low, high = ((end * factors[:, None]).view(-1) for end in (values.low, values.high))
    qparams = qparams_from_range(low, high, code_range)
    scale, zero_point = qparams.scale.to(sample), qparams.zero_point.to(sample.device)
    tried = sample.new_empty(DIFFS_CANDIDATES, *sample.shape).copy_(sample)
    rows = tried.view(-1, sample.shape[1])
    fill(rows, rows, scale, zero_point, kernel_of(spec), 0)
    errors = tried.sub_(sample).square_().sum(2)
    best = factors[errors.argmin(0).cpu()]
    return values.low * best, values.high * best


@register(METHODS, "entropy")
def entropy(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the range cut at the clip of the least Kullback-Leibler divergence; of equal ones
    the largest.

    For the first i bins of the magnitudes, i in 128, 160, ... 1536, 1552, ... 2048, the
    reference P is these bins with all that is beyond added to the last one; the candidate Q is
    the same bins merged into quant_max + 1 groups, each group's count spread evenly over its
    occupied bins. The first bin, where a ReLU's zeros are, counts as much as the second.
    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """
    levels = min(spec.quant_max + 1, BINS)
    counts = values.magnitudes.clone()
    counts[:, 0] = counts[:, 1]
    clips = torch.cat([torch.arange(128, 1536, 32), torch.arange(1536, BINS + 1, 16)])
    at_once = max(1, ENTROPY_AT_ONCE // (len(clips) * levels))
    divergence = torch.cat(
        [_divergence(part, clips, levels) for part in torch.split(counts, at_once)]
    )
    last_minimum = len(clips) - 1 - divergence.flip(1).argmin(1)
    return values.clipped(values.width * clips[last_minimum])


def _divergence(counts: Tensor, clips: Tensor, levels: int) -> Tensor:
    """Return KL(P || Q) per row of `counts` (R, BINS) and clip, (R, clips); infinite where Q
    lacks a bin of P.

    With c the counts, P' = c plus the tail at bin i - 1, and m the mean of a bin's group,
    running sums give every term of KL = (sum P' log P' - sum P' log m) / sum c - log sum c +
    log sum_{j<i} c_j.
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
    cross = torch.xlogy(groups, means).sum(2) + torch.xlogy(
        tail, torch.where(last > 0, last_mean, 0.0)
    )
    return ((reference - cross) / total - total.log() + inside.log()).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )


def _running(x: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, ... values of each row."""
    return torch.nn.functional.pad(x.cumsum(1), (1, 0))


def modal(values: list[float]) -> float:
    """Return the most frequent value; of equally frequent ones the largest, the coarser scale,
    which clips least.

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

    Raises:
        ValueError: there is no such statistic.

    >>> reduce_batches(torch.tensor([[1.0], [2.0], [6.0]]), "mean").tolist()
    [3.0]
    """
    statistic = lookup(STATISTICS, name, "statistic over batches")
    if len(values) == 1:
        return values[0].double()
    return torch.tensor(
        [statistic(column) for column in values.T.tolist()], dtype=torch.float64
    )
