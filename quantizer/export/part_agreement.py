"""Measures how far one output of a file, or one part of it, is from test mode's."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.extents import MIN_VALUES, Extent, is_flat
from quantizer.comparison.noise import Noise

# The least share of values within one step. Integer kernels round ties and biases otherwise.
WITHIN = 0.999
# Values that are compared at once, in float64.
_CHUNK_VALUES = 1 << 20
# One step of a scale, with a tolerance for the float arithmetic that multiplied it.
_STEP_TOLERANCE = 1.001


@dataclass
class PartAgreement:
    """The differences of one output or part, summed over all batches.

    Attributes:
        name: of the output or part; `index` is another name of a part.
        step: the distance of two codes; None if they have no scale in common.
        count: number of values; `equal` of them are equal, `within` at most one step away.
        noise: of floating-point values.
        expected, actual: the ranges of test mode's and of the file's values.
        float_sqnr_db: of the file against the float network, where that decides.
    """

    name: str
    index: str | None = None
    step: float | None = None
    is_float: bool = False
    count: int = 0
    equal: int = 0
    within: int = 0
    largest: float = 0.0
    total: float = 0.0
    noise: Noise = field(default_factory=Noise)
    expected: Extent = field(default_factory=Extent)
    actual: Extent = field(default_factory=Extent)
    float_sqnr_db: float | None = None

    def add(self, expected: Tensor, actual: Tensor) -> None:
        """Add one batch; NaN and infinity equal themselves."""
        self.is_float |= expected.is_floating_point()
        expected_chunks = torch.split(expected.reshape(-1), _CHUNK_VALUES)
        actual_chunks = torch.split(actual.reshape(-1), _CHUNK_VALUES)
        for expected_chunk, actual_chunk in zip(expected_chunks, actual_chunks, strict=True):
            self._add_chunk(expected_chunk, actual_chunk)

    def _add_chunk(self, expected: Tensor, actual: Tensor) -> None:
        signal = expected.double()
        other = actual.double()
        is_same = (signal == other) | (signal.isnan() & other.isnan())
        difference = torch.where(is_same, 0.0, (signal - other).abs())
        if difference.numel():
            self.largest = max(self.largest, float(difference.nan_to_num(math.inf).max()))
        self.total += float(difference.sum())
        self.count += expected.numel()
        self.equal += int(is_same.sum())
        step = self.step if expected.is_floating_point() else 0.0
        if step is not None:
            self.within += int((difference <= _STEP_TOLERANCE * step).sum())
        if expected.is_floating_point():
            finite = torch.where(signal.isfinite(), signal, 0.0)
            self.noise.signal += float(finite.square().sum())
            self.noise.error += float(difference.square().sum())
            self.expected.merge(Extent.of(finite))
            self.actual.merge(Extent.of(other.nan_to_num(math.inf)))

    @property
    def is_stepped(self) -> bool:
        """Return whether its values are codes times one scale, or integers."""
        return self.step is not None or not self.is_float

    @property
    def equal_share(self) -> float:
        """Return the share of equal values."""
        return self.equal / self.count if self.count else 1.0

    @property
    def within_share(self) -> float | None:
        """Return the share of values at most one step away; None without a step."""
        if not self.is_stepped:
            return None
        return self.within / self.count if self.count else 1.0

    @property
    def sqnr_db(self) -> float | None:
        """Return the SQNR in dB, infinite without a difference.

        None if there are no floating-point values other than zero.
        """
        if not self.is_float or not self.noise.signal:
            return None
        return self.noise.sqnr_db if math.isfinite(self.noise.error) else -math.inf

    @property
    def collapses(self) -> bool:
        """Return whether the file gives one value where test mode gives several."""
        is_several = self.is_float and self.count >= MIN_VALUES and not is_flat(self.expected)
        return is_several and self.actual.is_constant

    def to_json(self) -> dict[str, Any]:
        """Return the figures that it has, without infinite ones."""
        figures = {
            "equal": self.equal_share,
            "within_step": self.within_share,
            "max_difference": self.largest,
            "sqnr_db": self.sqnr_db,
            "float_sqnr_db": self.float_sqnr_db,
        }
        content: dict[str, Any] = {"name": self.name, "index": self.index, "values": self.count}
        for figure, value in figures.items():
            if value is not None and math.isfinite(value):
                content[figure] = value
        return content
