"""How far one output of a file, or one part of it, is from test mode's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_figures import FEW, Extent, is_flat

WITHIN = 0.999
"""The share of values that may be a step off at most: kernels of integers round ties and
biases otherwise."""
CHUNK = 1 << 20
"""Values that are compared at once, in float64."""
EDGE = 1.001
"""One step of a scale, with room for the float arithmetic that multiplied it."""


@dataclass
class PartAgreement:
    """One output or part, over all batches.

    Attributes:
        name: of the output or part; `index` is another name of a part.
        step: the distance of two codes, None where they have no scale in common.
        count: values, of which `equal` are equal and `within` at most one step away.
        noise: of floating-point values.
        expected: the range of test mode's values; `actual` is that of the file's.
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

    def add(self, want: Tensor, got: Tensor) -> None:
        """Take in one batch; NaN and infinity equal themselves."""
        self.is_float |= want.is_floating_point()
        pieces = (torch.split(tensor.reshape(-1), CHUNK) for tensor in (want, got))
        for piece, other in zip(*pieces, strict=True):
            self._add(piece, other)

    def _add(self, want: Tensor, got: Tensor) -> None:
        signal, other = want.double(), got.double()
        same = (signal == other) | (signal.isnan() & other.isnan())
        difference = torch.where(same, 0.0, (signal - other).abs())
        if difference.numel():
            self.largest = max(self.largest, float(difference.nan_to_num(math.inf).max()))
        self.total += float(difference.sum())
        self.count += want.numel()
        self.equal += int(same.sum())
        step = self.step if want.is_floating_point() else 0.0
        if step is not None:
            self.within += int((difference <= EDGE * step).sum())
        if want.is_floating_point():
            finite = torch.where(signal.isfinite(), signal, 0.0)
            self.noise.signal += float(finite.square().sum())
            self.noise.error += float(difference.square().sum())
            self.expected.merge(Extent.of(finite))
            self.actual.merge(Extent.of(other.nan_to_num(math.inf)))

    @property
    def is_stepped(self) -> bool:
        """Whether its values are codes times one scale, or integers."""
        return self.step is not None or not self.is_float

    @property
    def equal_share(self) -> float:
        """The share of equal values."""
        return self.equal / self.count if self.count else 1.0

    @property
    def within_share(self) -> float | None:
        """The share of values at most one step away; None without a step."""
        if not self.is_stepped:
            return None
        return self.within / self.count if self.count else 1.0

    @property
    def sqnr_db(self) -> float | None:
        """Infinite without a difference; None without floating-point values other than zero."""
        if not self.is_float or not self.noise.signal:
            return None
        return self.noise.sqnr_db if math.isfinite(self.noise.error) else -math.inf

    @property
    def collapses(self) -> bool:
        """Whether the file makes one value of what are several in test mode."""
        is_several = self.is_float and self.count >= FEW and not is_flat(self.expected)
        return is_several and self.actual.is_constant

    def to_json(self) -> dict[str, Any]:
        """Return the figures that it has; infinite ones are left out."""
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
