"""What outputs of a network lose, each by itself and part by part, added up over batches.

A loss in a small part cannot hide behind a large one: the worst part speaks for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.errors import DataError
from quantizer.graph.output_parts import Output

NAMED_FIGURES = ("sqnr_db", "cosine", "equal_outputs")
"""What there is of each output and part."""
POOLED_FIGURE = "sqnr_db_pooled"
"""The SQNR of all outputs together."""
ROWS_KEPT = "rows_kept"
"""The share of rows that both networks select, where an operator selects rows by their
values."""
NOT_FINITE = "the float model's output is not finite"
FEW = 4
"""Values of a channel that may be equal by chance."""
FLAT = 1e-3
"""Values that differ by less than this share of the largest are one value."""


@dataclass
class Extent:
    """The least and the greatest value of something."""

    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, x: Tensor) -> Extent:
        """Return that of a tensor, which may be empty."""
        if not x.numel():
            return cls()
        low, high = x.aminmax()
        return cls(float(low), float(high))

    def merge(self, other: Extent) -> None:
        """Take in other batches."""
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity in it; an empty one has not."""
        ends = (self.low, self.high)
        return all(map(math.isfinite, ends)) or ends == (math.inf, -math.inf)

    @property
    def is_constant(self) -> bool:
        """Whether there is one value alone."""
        return self.low == self.high


@dataclass
class PartFigures:
    """What one output, or one part of one, loses.

    Attributes:
        name: of the output or part; `index` is another name of a part, if it has one.
        layer: what makes it.
        is_fixed: whether it follows from constants alone.
        pooled: the number of sources that it stands for.
        count: its values, of which `equal` are the same in both networks.
        noise: of its floating-point values.
        reference: the range of the float network's values; `other` is that of the quantized
            one's.
    """

    name: str
    index: str | None = None
    layer: str = ""
    is_fixed: bool = False
    pooled: int = 1
    is_float: bool = False
    count: int = 0
    equal: int = 0
    noise: Noise = field(default_factory=Noise)
    reference: Extent = field(default_factory=Extent)
    other: Extent = field(default_factory=Extent)

    def add(self, x: Tensor, y: Tensor, ranges: tuple[Extent, Extent] | None = None) -> None:
        """Take in the values of one batch, of both networks; their ranges, if they are known.

        Raises:
            DataError: the float network's are not finite.
        """
        self.count += x.numel()
        self.equal += int(torch.count_nonzero(x == y))
        if not x.is_floating_point():
            return
        self.is_float = True
        if self.is_fixed:
            return
        if ranges is None:
            ranges = Extent.of(x), Extent.of(y)
        if not ranges[0].is_finite:
            raise DataError(NOT_FINITE, help="check the data and the weights")
        self.noise.add(x, y)
        self.reference.merge(ranges[0])
        self.other.merge(ranges[1])

    def merge(self, other: PartFigures) -> None:
        """Take in other batches."""
        self.count += other.count
        self.equal += other.equal
        self.is_float |= other.is_float
        self.noise.merge(other.noise)
        self.reference.merge(other.reference)
        self.other.merge(other.other)

    @property
    def kind(self) -> str:
        """What it is: "float" alone has an SQNR."""
        if not self.count:
            return "empty"
        if not self.is_float:
            return "integer"
        if self.is_fixed or (self.count > 1 and self.reference.is_constant):
            return "constant"
        return "float"

    @property
    def sqnr_db(self) -> float | None:
        """In dB; None for what is constant, integer or empty."""
        return self.noise.sqnr_db if self.kind == "float" else None

    @property
    def cosine(self) -> float | None:
        """Between both networks' values; None for what is constant, integer or empty."""
        return self.noise.cosine if self.kind == "float" else None

    @property
    def equal_share(self) -> float | None:
        """The share of equal values; None where there are no values."""
        return self.equal / self.count if self.count else None

    @property
    def collapses(self) -> bool:
        """Whether quantization makes it one value, which it is not in float."""
        is_several = self.kind == "float" and self.count >= FEW and not is_flat(self.reference)
        return is_several and self.other.is_constant

    @property
    def appears(self) -> bool:
        """Whether quantization makes several values of what is one value in float."""
        is_one = self.kind == "constant" and not self.is_fixed
        return is_one and not self.other.is_constant

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {
            "name": self.name,
            "index": self.index,
            "layer": self.layer,
            "kind": self.kind,
            "values": self.count,
            "pooled": self.pooled,
            "sqnr_db": self.sqnr_db,
            "cosine": self.cosine,
            "equal": self.equal_share,
        }


def is_flat(extent: Extent) -> bool:
    """Return whether values differ by so little that they are one value."""
    return extent.high - extent.low <= FLAT * max(abs(extent.low), abs(extent.high))


@dataclass
class ChannelExtents:
    """The range of each channel of an output in both networks; `axis` is theirs.

    `count` is the number of values of a channel.
    """

    axis: int
    count: int
    low: Tensor
    high: Tensor
    other_low: Tensor
    other_high: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, axis: int) -> ChannelExtents | None:
        """Return those of one batch; None if there is no such axis, or there are no values."""
        if x.dim() <= axis or not x.numel() or x.shape != y.shape:
            return None
        ends: list[Tensor] = []
        for values in (x, y):
            ends += _ends_along(values, axis)
        return cls(axis, x.numel() // x.shape[axis], *ends)

    @property
    def whole(self) -> tuple[Extent, Extent]:
        """The ranges of all channels together, in both networks."""
        reference = Extent(float(self.low.min()), float(self.high.max()))
        return reference, Extent(float(self.other_low.min()), float(self.other_high.max()))

    def merged(self, other: ChannelExtents) -> ChannelExtents | None:
        """Return those of both; None if they do not have the same channels."""
        if self.low.shape != other.low.shape:
            return None
        return ChannelExtents(
            self.axis,
            self.count + other.count,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            torch.minimum(self.other_low, other.other_low),
            torch.maximum(self.other_high, other.other_high),
        )

    @property
    def collapsed(self) -> list[int]:
        """The channels that quantization makes one value, which they are not in float."""
        if self.count < FEW or len(self.low) < 2:
            return []
        spread = self.high - self.low
        largest = torch.maximum(self.low.abs(), self.high.abs())
        is_lost = (self.other_low == self.other_high) & (spread > FLAT * largest)
        return [int(channel) for channel in is_lost.nonzero().flatten().tolist()]


def _ends_along(values: Tensor, axis: int) -> list[Tensor]:
    """Return the least and the greatest value at each index of an axis."""
    others = [other for other in range(values.dim()) if other != axis]
    return [values.amin(others).float().cpu(), values.amax(others).float().cpu()]


@dataclass
class RowCounts:
    """Of the rows that the float network selects: how many the quantized one does not, and
    has in another place.

    `unmatched` are those, besides, that cannot be followed back to where they were.
    """

    rows: int = 0
    moved: int = 0
    exchanged: int = 0
    unmatched: int = 0

    def merge(self, other: RowCounts) -> None:
        """Take in other batches."""
        self.rows += other.rows
        self.moved += other.moved
        self.exchanged += other.exchanged
        self.unmatched += other.unmatched

    def to_json(self) -> dict[str, int]:
        """Return the counts by name; that of unmatched rows where there are such."""
        counts = {"rows": self.rows, "moved": self.moved, "exchanged": self.exchanged}
        return counts | {"unmatched": self.unmatched} if self.unmatched else counts

    @property
    def share(self) -> float:
        """The share of rows that both networks select."""
        return 1 - self.exchanged / self.rows if self.rows else 1.0


@dataclass
class OutputFigures:
    """What one output loses: as a whole, in each of its `parts` if there are several, and in
    its channels.

    `order` is there where an operator puts rows in an order that depends on values.
    """

    whole: PartFigures
    parts: list[PartFigures] = field(default_factory=list)
    channels: ChannelExtents | None = None
    order: RowCounts | None = None

    def merge(self, other: OutputFigures) -> None:
        """Take in other batches."""
        if not self.whole.count:
            self.channels = other.channels
        elif self.channels is not None:
            others = other.channels
            self.channels = None if others is None else self.channels.merged(others)
        self.whole.merge(other.whole)
        for part, its in zip(self.parts, other.parts, strict=True):
            part.merge(its)
        if other.order is not None:
            self.order = self.order or RowCounts()
            self.order.merge(other.order)

    @property
    def leaves(self) -> list[PartFigures]:
        """Its parts that have values, or itself if it has none."""
        return [part for part in self.parts if part.count] or [self.whole]

    @property
    def rows(self) -> list[PartFigures]:
        """Itself, and its parts that have values."""
        return [self.whole, *(part for part in self.parts if part.count)]


def leaves(outputs: Sequence[OutputFigures]) -> Iterator[PartFigures]:
    """Yield the smallest things that have figures: parts, and outputs without parts."""
    for output in outputs:
        yield from output.leaves


def worst(outputs: Sequence[OutputFigures]) -> PartFigures | None:
    """Return the part or output with the lowest SQNR, the first of equal ones; None if none
    has an SQNR."""
    lowest: tuple[float, PartFigures] | None = None
    for part in leaves(outputs):
        sqnr = part.sqnr_db
        if sqnr is not None and (lowest is None or sqnr < lowest[0]):
            lowest = sqnr, part
    return None if lowest is None else lowest[1]


def lowest_cosine(outputs: Sequence[OutputFigures]) -> float | None:
    """Return the lowest cosine of a part or output, NaN if one is NaN; None if none has a
    cosine."""
    cosines = [part.cosine for part in leaves(outputs) if part.cosine is not None]
    if any(map(math.isnan, cosines)):
        return math.nan
    return min(cosines, default=None)


def pooled(outputs: Sequence[OutputFigures]) -> Noise:
    """Return the noise of all floating-point outputs together."""
    noise = Noise()
    for output in outputs:
        noise.merge(output.whole.noise)
    return noise


def named_metrics(outputs: Sequence[OutputFigures]) -> dict[str, float]:
    """Return the figures of each output and part by the names that gates have for them:
    `sqnr_db[0.boxes]`."""
    metrics: dict[str, float] = {}
    for output in outputs:
        for row in output.rows:
            figures = {
                "sqnr_db": row.sqnr_db,
                "cosine": row.cosine,
                "equal_outputs": row.equal_share,
            }
            if row is output.whole and output.order is not None and output.order.rows:
                figures[ROWS_KEPT] = output.order.share
            for figure, value in figures.items():
                if value is None:
                    continue
                for name in filter(None, (row.name, row.index)):
                    metrics[f"{figure}[{name}]"] = value
    return metrics


def metric_names(outputs: Sequence[Output]) -> set[str]:
    """Return what gates may ask for of the outputs and parts of a network, before it runs.

    What is integer or follows from constants alone has a share of equal values alone.
    """
    names: set[str] = set()
    for output in outputs:
        is_fixed = all(part.is_constant for part in output.parts)
        rows = [(output.name, is_fixed)]
        for part in output.parts:
            rows += [(part.name, part.is_constant), (part.index or part.name, part.is_constant)]
        for name, is_constant in rows:
            is_rated = output.is_float and not is_constant
            figures = NAMED_FIGURES if is_rated else NAMED_FIGURES[-1:]
            names |= {f"{figure}[{name}]" for figure in figures}
        if output.order is not None:
            names |= {ROWS_KEPT, f"{ROWS_KEPT}[{output.name}]"}
    return names
