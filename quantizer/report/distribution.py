"""Compute what a tensor's histogram and its scale say together: the share that is clipped, the
codes that are used, the SQNR.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.histogram import BINS, Histogram
from quantizer.numerics.metrics import decibel
from quantizer.numerics.qparams import IntegerRange, QParams
from quantizer.observers import RANGE_METHODS, Observer, code_range_of

DRAWN_BINS = 128
PERCENTAGES = (99.9, 99.99)
"""Percentages of the ranges that the percentile method would give."""


@dataclass(frozen=True)
class TensorDistribution:
    """The values of one tensor, under a spec with one scale."""

    histogram: Histogram
    spec: QuantizationSpec

    @cached_property
    def _occupied(self) -> tuple[Tensor, Tensor]:
        """Return the centres of the bins that have values, and their counts.

        No centre lies further out than any value.
        """
        histogram = self.histogram
        bins = histogram.counts[0].nonzero().squeeze(1)
        centres = (bins - BINS + 0.5) * histogram.width
        counts = histogram.counts[0, bins].double()
        return centres.clamp(histogram.low, histogram.high), counts

    def limits(self, qparams: QParams) -> tuple[float, float]:
        """Return the least and the greatest value that has a code."""
        codes = code_range_of(self.spec)
        if isinstance(codes, IntegerRange):
            least, greatest = float(codes.quant_min), float(codes.quant_max)
        else:
            least, greatest = -codes.largest, codes.largest
        zero_point, scale = float(qparams.zero_point), float(qparams.scale)
        return (least - zero_point) * scale, (greatest - zero_point) * scale

    def clipped(self, qparams: QParams) -> float:
        """Return the share of values that lie more than half a step beyond the limits."""
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
        """Return the share of the integer codes that lie in a bin with values."""
        low, high = self.limits(qparams)
        scale = float(qparams.scale)
        first_code = round(low / scale)
        centres, _ = self._occupied
        half_bin = self.histogram.width / 2

        def code_of(values: Tensor) -> Tensor:
            return ((values.clamp(low, high) / scale).round() - first_code).long()

        begins = code_of(centres - half_bin)
        stops = code_of(centres + half_bin)
        # How many bins begin at a code, less those that ended before it: the running sum says
        # how many bins cover a code.
        changes = torch.zeros(round(high / scale) - first_code + 2, dtype=torch.int64)
        changes.index_add_(0, begins, torch.ones_like(begins))
        changes.index_add_(0, stops + 1, -torch.ones_like(stops))
        is_used = changes.cumsum(0)[:-1] > 0
        return float(is_used.double().mean())

    def methods(self, qparams: QParams) -> dict[str, tuple[float, float]]:
        """Return the limits that each range method would give on all values at once, by name.

        The method of the spec itself has those of `qparams`. Methods that have no range for
        such a spec are left out.
        """
        limits: dict[str, tuple[float, float]] = {}
        for name in RANGE_METHODS:
            if name != "percentile":
                self._add_limits(limits, name, name, qparams)
                continue
            for percentage in PERCENTAGES:
                label = f"{name} {percentage:g}"
                self._add_limits(limits, label, name, qparams, percentage=percentage)
        return limits

    def _add_limits(
        self,
        limits: dict[str, tuple[float, float]],
        label: str,
        method: str,
        qparams: QParams,
        **fields: Any,
    ) -> None:
        """Add the limits of one method, if it has a range for the spec."""
        words = {"method": method, "statistic": POOLED, **fields}
        try:
            observer = Observer(replace(self.spec, **words))
        except ValueError:
            return
        if observer.spec != self.spec:
            state = {"batches": torch.tensor(1), **self.histogram.to_tensors()}
            observer.load_state_dict(state)
            qparams = observer.qparams()
        limits[label] = self.limits(qparams)

    def drawn(self) -> dict[str, Any]:
        """Return the counts in few equal bins between the least and the greatest value."""
        low, high = float(self.histogram.low), float(self.histogram.high)
        centres, counts = self._occupied
        shares = (centres - low) / ((high - low) or 1.0)
        bins = (shares * DRAWN_BINS).long().clamp(0, DRAWN_BINS - 1)
        drawn = torch.zeros(DRAWN_BINS, dtype=torch.float64).index_add_(0, bins, counts)
        return {"low": low, "high": high, "counts": drawn.long().tolist()}
