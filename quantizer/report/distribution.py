"""Compute figures of a scale from the histogram of a tensor: the share of clipped values, the
share of used codes, the SQNR.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quantizer.config.json_types import JsonObject
from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.formats import IntegerRange
from quantizer.numerics.histogram import BINS, Histogram
from quantizer.numerics.metrics import decibel
from quantizer.numerics.qparams import QParams
from quantizer.observers import Observer, code_range_of
from quantizer.tables import RANGE_METHODS

_DRAWN_BINS = 128
_PERCENTAGES = (99.9, 99.99)
"""The percentages for which the report shows the limits of the percentile method."""


@dataclass(frozen=True)
class TensorDistribution:
    """The values of one tensor, under a spec with one scale."""

    histogram: Histogram
    spec: QuantizationSpec

    @cached_property
    def _occupied(self) -> tuple[Tensor, Tensor]:
        """Return the centres of the bins that have values, and their counts.

        Centres of the outermost bins are moved to the least and the greatest value, if these
        are nearer to zero.
        """
        histogram = self.histogram
        bins = histogram.counts[0].nonzero().squeeze(1)
        centres = (bins - BINS + 0.5) * histogram.width
        centres = centres.clamp(histogram.low, histogram.high)
        counts = histogram.counts[0, bins].double()
        return centres, counts

    def limits(self, qparams: QParams) -> tuple[float, float]:
        """Return the least and the greatest value that has a code."""
        codes = code_range_of(self.spec)
        if isinstance(codes, IntegerRange):
            least = float(codes.quant_min)
            greatest = float(codes.quant_max)
        else:
            least = -codes.largest
            greatest = codes.largest
        scale = float(qparams.scale)
        zero_point = float(qparams.zero_point)
        return (least - zero_point) * scale, (greatest - zero_point) * scale

    def clipped(self, qparams: QParams) -> float:
        """Return the share of values that are more than half a step beyond the limits."""
        low, high = self.limits(qparams)
        half_step = float(qparams.scale) / 2
        centres, counts = self._occupied
        is_clipped = (centres < low - half_step) | (centres > high + half_step)
        return float(counts[is_clipped].sum() / counts.sum())

    def sqnr_db(self, qparams: QParams) -> float:
        """Return the SQNR of values at the centres of their bins."""
        centres, counts = self._occupied
        quantized = quantize_tensor(
            centres.float(), self.spec, qparams.scale, qparams.zero_point
        )
        error = quantized.double() - centres
        return decibel(float(counts @ centres.square()), float(counts @ error.square()))

    def codes_used(self, qparams: QParams) -> float:
        """Return the share of the integer codes that are in a bin with values."""
        low, high = self.limits(qparams)
        scale = float(qparams.scale)
        first_code = round(low / scale)
        last_code = round(high / scale)
        centres, _ = self._occupied
        half_bin = self.histogram.width / 2

        def code_of(values: Tensor) -> Tensor:
            """Return the code of each value, counted from the first code."""
            return (values.clamp(low, high) / scale).round().sub(first_code).long()

        begins = code_of(centres - half_bin)
        ends = code_of(centres + half_bin)
        # At each code: how many bins begin there, minus how many ended just before. The running
        # sum of this is the number of bins that cover the code.
        changes = torch.zeros(last_code - first_code + 2, dtype=torch.int64)
        ones = torch.ones_like(begins)
        changes.index_add_(0, begins, ones)
        changes.index_add_(0, ends + 1, -ones)
        is_used = changes.cumsum(0)[:-1] > 0
        return float(is_used.double().mean())

    def methods(self, qparams: QParams) -> dict[str, tuple[float, float]]:
        """Return the limits that each range method would give on all values at once, by name.

        The method of the spec itself has the limits of `qparams`. Methods that cannot be used
        with such a spec are left out.
        """
        changes: dict[str, JsonObject] = {}
        for method in RANGE_METHODS:
            if method != "percentile":
                changes[method] = {"method": method}
                continue
            for percentage in _PERCENTAGES:
                label = f"{method} {percentage:g}"
                changes[label] = {"method": method, "percentage": percentage}
        state = {"batches": torch.tensor(1), **self.histogram.to_tensors()}
        limits = {}
        for label, change in changes.items():
            try:
                spec = replace(self.spec, statistic=POOLED, **change)
                observer = Observer(spec)
            except ValueError:
                continue
            method_qparams = qparams
            if observer.spec != self.spec:
                observer.load_state_dict(state)
                method_qparams = observer.qparams()
            limits[label] = self.limits(method_qparams)
        return limits

    def drawn(self) -> JsonObject:
        """Return the counts in the bins of a drawing, from the least to the greatest value."""
        low = float(self.histogram.low)
        high = float(self.histogram.high)
        width = (high - low) or 1.0
        centres, counts = self._occupied
        bins = ((centres - low) / width * _DRAWN_BINS).long().clamp(0, _DRAWN_BINS - 1)
        drawn = torch.zeros(_DRAWN_BINS, dtype=torch.float64)
        drawn.index_add_(0, bins, counts)
        return {"low": low, "high": high, "counts": drawn.long().tolist()}
