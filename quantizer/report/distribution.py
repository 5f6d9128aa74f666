"""What a tensor's histogram and its scale say together: what is cut off, which codes are used,
what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.nn.quantizer import place
from quantizer.numerics.histogram import BINS, Histogram
from quantizer.numerics.metrics import decibel
from quantizer.numerics.qparams import IntegerRange, QParams
from quantizer.observers import METHODS, Observer, code_range_of

DRAWN = 128
"""Bins of a drawing."""
PERCENTAGES = (99.9, 99.99)
"""Of the ranges that the percentile method would give."""


@dataclass(frozen=True)
class Distribution:
    """The values of one tensor in one row, under a spec with one scale."""

    histogram: Histogram
    spec: QuantizationSpec

    @cached_property
    def _occupied(self) -> tuple[Tensor, Tensor]:
        """Centres of the bins with values in them, no further out than any value, and their
        counts.
        """
        at = self.histogram.counts[0].nonzero().squeeze(1)
        centres = (at - BINS + 0.5) * self.histogram.width
        return centres.clamp(self.histogram.low, self.histogram.high), self.histogram.counts[
            0, at
        ].double()

    def limits(self, qparams: QParams) -> tuple[float, float]:
        """The least and the greatest value that a code stands for."""
        codes = code_range_of(self.spec)
        ends = (
            (codes.quant_min, codes.quant_max)
            if isinstance(codes, IntegerRange)
            else (-codes.largest, codes.largest)
        )
        low, high = ((end - float(qparams.zero_point)) * float(qparams.scale) for end in ends)
        return low, high

    def clipped(self, qparams: QParams) -> float:
        """The share of values beyond these limits by more than half a step, which are cut
        off.
        """
        (low, high), half = self.limits(qparams), float(qparams.scale) / 2
        centres, counts = self._occupied
        return float(
            counts[(centres < low - half) | (centres > high + half)].sum() / counts.sum()
        )

    def sqnr_db(self, qparams: QParams) -> float:
        """Of the values at the centres of their bins."""
        centres, counts = self._occupied
        lost = (
            place(centres.float(), self.spec, qparams.scale, qparams.zero_point).double()
            - centres
        )
        return decibel(float(counts @ centres.square()), float(counts @ lost.square()))

    def codes_used(self, qparams: QParams) -> float:
        """The share of the codes of integers that some value has, counted between neighbouring
        bins' edges.
        """
        (low, high), scale = self.limits(qparams), float(qparams.scale)
        centres, _ = self._occupied
        half, first = self.histogram.width / 2, round(low / scale)
        begins, stops = (
            ((end.clamp(low, high) / scale).round() - first).long()
            for end in (centres - half, centres + half)
        )
        covering = torch.zeros(round(high / scale) - first + 2, dtype=torch.int64)
        covering.index_add_(0, begins, torch.ones_like(begins)).index_add_(
            0, stops + 1, -torch.ones_like(stops)
        )
        return float((covering.cumsum(0)[:-1] > 0).double().mean())

    def methods(self, qparams: QParams) -> dict[str, tuple[float, float]]:
        """Where the range methods that suit the spec cut, given all values at once, by name;
        its own has `qparams`.
        """
        found = {}
        for name in METHODS:
            for percentage in PERCENTAGES if name == "percentile" else (self.spec.percentage,):
                label = f"{name} {percentage:g}" if name == "percentile" else name
                words: Any = {"method": name, "percentage": percentage, "statistic": POOLED}
                try:
                    observer = Observer(replace(self.spec, **words))
                except ValueError:  # the method has no range for such a spec
                    continue
                if observer.spec == self.spec:
                    found[label] = self.limits(qparams)
                    continue
                observer.load_state_dict(
                    {"batches": torch.tensor(1), **self.histogram.to_tensors()}
                )
                found[label] = self.limits(observer.qparams())
        return found

    def drawn(self) -> dict[str, Any]:
        """Counts in few equal bins between the least and the greatest value."""
        low, high = float(self.histogram.low), float(self.histogram.high)
        centres, counts = self._occupied
        at = ((centres - low) / ((high - low) or 1.0) * DRAWN).long().clamp(0, DRAWN - 1)
        bins = torch.zeros(DRAWN, dtype=torch.float64).index_add_(0, at, counts)
        return {"low": low, "high": high, "counts": bins.long().tolist()}
