"""Measures the error of each output of a network, and of each part of it, over batches.

The worst part counts, so that a large part cannot hide the error of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.extents import (
    MIN_FOR_RANGE,
    MIN_VALUES,
    ChannelExtents,
    Extent,
    is_flat,
    is_lost,
    varying_noise,
)
from quantizer.comparison.noise import Moments, Noise
from quantizer.comparison.samples import (
    BELOW_DB,
    SampleFigures,
    SampleNoise,
    SampleRows,
    sample_json,
)
from quantizer.errors import DataError
from quantizer.graph.channels.output_parts import Output
from quantizer.numerics.metrics import Energies

WORST_SAMPLES = "sqnr_db_worst"
"""The SQNR that all but the worst twentieth of samples have."""
_EQUAL = "equal_outputs"
NAMED_FIGURES = ("sqnr_db", WORST_SAMPLES, "cosine", _EQUAL)
"""The figures of each output and part."""
POOLED_FIGURE = "sqnr_db_pooled"
"""The SQNR of all outputs together."""
ROWS_KEPT = "rows_kept"
"""The share of rows that both networks select, where an operator selects rows by their
values."""
NOT_FINITE = "the float model's output is not finite"


@dataclass
class PartFigures:
    """The figures of one output, or of one part of it.

    Args:
        name: of the output or part.
        index: another name of a part that is a range of indices, such as `0[4:7]`.
        layer: the layer that computes the values.
        is_fixed: whether the values follow from constants alone. They get no noise.
        pooled: the number of sources whose values are counted together.
        is_float: whether the values are floating-point numbers.
        count: how many values there are.
        equal: how many values are the same in both networks.
        noise: the error of floating-point values.
        reference: the range of the float network's values.
        other: the range of the quantized network's values.
        moments: of the float network's values, if their range may be narrow.
        channels: the ranges of the channels of a whole output, if it has channels.
        samples: the error of each sample, if the samples are known.
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
    moments: Moments | None = None
    channels: ChannelExtents | None = None
    samples: SampleNoise = field(default_factory=SampleNoise)

    def add(
        self,
        x: Tensor,
        y: Tensor,
        ranges: tuple[Extent, Extent] | None = None,
        rows: SampleRows | None = None,
    ) -> None:
        """Add the values of one batch.

        Args:
            x: of the float network.
            y: of the quantized network.
            ranges: of both, if they are known.
            rows: where the samples are; None if that is not known.

        Raises:
            DataError: a value of the float network is not finite.
        """
        self.count += x.numel()
        self.equal += int(torch.count_nonzero(x == y))
        if not x.is_floating_point():
            return
        self.is_float = True
        if self.is_fixed:
            return
        reference, other = ranges or (Extent.of(x), Extent.of(y))
        if not reference.is_finite:
            raise DataError(NOT_FINITE, help="check the data and the weights")
        energies = None
        if rows is None:
            self.noise.add(x, y)
        else:
            # What all samples have together is not read again
            energies = rows.energies(x, y)
            sums = list(map(math.fsum, energies.tolist()))
            self.noise.add_energies(sums[0], Energies(*sums[1:]))
        self.samples.add(energies)
        self._add_moments(x, reference)
        self.reference.merge(reference)
        self.other.merge(other)

    def _add_moments(self, x: Tensor, extent: Extent) -> None:
        """Add the moments of a batch, unless its values or earlier ones are far apart."""
        is_first = self.reference.is_empty
        if not extent.may_be_narrow or (self.moments is None and not is_first):
            self.moments = None
            return
        moments = Moments.of(x, range(x.dim()))
        self.moments = moments if self.moments is None else self.moments.merged(moments)

    def merge(self, other: PartFigures) -> None:
        """Add other batches."""
        if self.reference.is_empty:
            self.moments = other.moments
        elif self.moments is not None and other.moments is not None:
            self.moments = self.moments.merged(other.moments)
        elif not other.reference.is_empty:
            self.moments = None
        self.count += other.count
        self.equal += other.equal
        self.is_float |= other.is_float
        self.noise.merge(other.noise)
        self.samples.merge(other.samples)
        self.reference.merge(other.reference)
        self.other.merge(other.other)

    @property
    def kind(self) -> str:
        """Return "empty", "integer", "constant" or "float"; only "float" has an SQNR."""
        if not self.count:
            return "empty"
        if not self.is_float:
            return "integer"
        if self.is_fixed or (self.count > 1 and self.reference.is_constant):
            return "constant"
        return "float"

    @property
    def sqnr_db(self) -> float | None:
        """Return the SQNR in dB; None for constant, integer or no values.

        Where that of all values would hide a loss, it is the SQNR of what varies.
        """
        ratios = [noise.sqnr_db for noise in self._rated]
        return min(ratios, default=None)

    @property
    def sample_figures(self) -> SampleFigures | None:
        """Return the figures of samples; None if they are not known, or there is no SQNR.

        None of them is above the SQNR of what varies, where that counts.
        """
        rated = self._rated
        figures = self.samples.figures if rated else None
        if figures is None:
            return None
        varying_db = min((noise.sqnr_db for noise in rated[1:]), default=math.inf)
        return figures.at_most(varying_db)

    @property
    def hides_samples(self) -> bool:
        """Return whether the worst samples have a much lower SQNR than all values."""
        figures = self.sample_figures
        sqnr_db = self.sqnr_db
        if figures is None or sqnr_db is None:
            return False
        return sqnr_db - figures.worst_db >= BELOW_DB

    @property
    def cosine(self) -> float | None:
        """Return the cosine of both networks' values, as for the SQNR; None where there is no
        SQNR.
        """
        return _lowest([noise.cosine for noise in self._rated])

    @property
    def _rated(self) -> list[Noise]:
        """Return the noise of all values, and that of what varies where all values hide it."""
        if self.kind != "float":
            return []
        noises = [self.noise]
        if self.hides_its_loss and self.moments is not None:
            noises.append(varying_noise(float(self.moments.squares), self.noise.error))
        if self.channels is not None:
            noises += self.channels.lost_noise
        return noises

    @property
    def equal_share(self) -> float | None:
        """Return the share of equal values; None if there are no values."""
        return self.equal / self.count if self.count else None

    @property
    def collapses(self) -> bool:
        """Return whether the float network's values differ and the quantized network's are all
        equal.
        """
        if self.kind != "float" or self.count < MIN_VALUES:
            return False
        return self.other.is_constant and not is_flat(self.reference)

    @property
    def rms_error(self) -> float:
        """Return the root mean square of the error."""
        return math.sqrt(self.noise.error / self.count) if self.count else 0.0

    @property
    def hides_its_loss(self) -> bool:
        """Return whether values of a narrow range far from zero lose what varies in them.

        Their SQNR is high because of the energy of what does not vary.
        """
        moments = self.moments
        if self.kind != "float" or self.count < MIN_FOR_RANGE or moments is None:
            return False
        low = torch.tensor(self.reference.low, dtype=torch.float64)
        high = torch.tensor(self.reference.high, dtype=torch.float64)
        return bool(is_lost(low, high, moments, torch.tensor(self.rms_error)))

    @property
    def appears(self) -> bool:
        """Return whether the float network's values are all equal and the quantized network's
        differ.
        """
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
            **sample_json(self.sample_figures),
        }


@dataclass
class RowCounts:
    """Counts of the rows that the float network selects.

    Args:
        rows: the rows whose origin, before the operator that selects, is known.
        moved: those of `rows` that the quantized network has in another place.
        exchanged: those of `rows` that the quantized network does not select.
        unmatched: the rows whose origin is not known.
    """

    rows: int = 0
    moved: int = 0
    exchanged: int = 0
    unmatched: int = 0

    def merge(self, other: RowCounts) -> None:
        """Add other batches."""
        self.rows += other.rows
        self.moved += other.moved
        self.exchanged += other.exchanged
        self.unmatched += other.unmatched

    def to_json(self) -> dict[str, int]:
        """Return the counts by name; that of unmatched rows only if there are any."""
        counts = asdict(self)
        if not self.unmatched:
            del counts["unmatched"]
        return counts

    @property
    def share(self) -> float:
        """Return the share of rows that both networks select."""
        return 1 - self.exchanged / self.rows if self.rows else 1.0


@dataclass
class OutputFigures:
    """The figures of one output.

    Args:
        whole: the figures of all its values.
        parts: the figures of its parts, if there are several.
        order: counts of rows, if an operator puts rows in an order that depends on values.
    """

    whole: PartFigures
    parts: list[PartFigures] = field(default_factory=list)
    order: RowCounts | None = None

    def merge(self, other: OutputFigures) -> None:
        """Add other batches."""
        channels = self.whole.channels
        if not self.whole.count:
            self.whole.channels = other.whole.channels
        elif channels is not None and other.whole.channels is not None:
            self.whole.channels = channels.merged(other.whole.channels)
        else:
            self.whole.channels = None
        self.whole.merge(other.whole)
        for part, other_part in zip(self.parts, other.parts, strict=True):
            part.merge(other_part)
        if other.order is not None:
            self.order = self.order or RowCounts()
            self.order.merge(other.order)

    @property
    def leaves(self) -> list[PartFigures]:
        """Return the parts that have values, or the whole if there are none."""
        return self.rows[1:] or [self.whole]

    @property
    def rows(self) -> list[PartFigures]:
        """Return the whole, and the parts that have values."""
        return [self.whole, *(part for part in self.parts if part.count)]


def leaves(outputs: Sequence[OutputFigures]) -> Iterator[PartFigures]:
    """Yield the figures of all parts, and of outputs that have no parts."""
    for output in outputs:
        yield from output.leaves


def worst(outputs: Sequence[OutputFigures]) -> PartFigures | None:
    """Return the part or output with the lowest SQNR, the first of equal ones; None if none
    has an SQNR."""
    rated = [part for part in _rated_rows(outputs) if part.sqnr_db is not None]
    return min(rated, key=lambda part: part.sqnr_db or 0.0, default=None)


def worst_samples_db(outputs: Sequence[OutputFigures]) -> float | None:
    """Return the lowest SQNR of the worst samples of an output or part; None if no samples are
    known. What has no samples counts with the SQNR of all values.
    """
    ratios = []
    has_samples = False
    for part in _rated_rows(outputs):
        figures = part.sample_figures
        has_samples |= figures is not None
        ratio = part.sqnr_db if figures is None else figures.worst_db
        if ratio is not None:
            ratios.append(ratio)
    return min(ratios) if has_samples else None


def lowest_cosine(outputs: Sequence[OutputFigures]) -> float | None:
    """Return the lowest cosine of a part or output, NaN if one is NaN; None if none has a
    cosine."""
    cosines = [part.cosine for part in _rated_rows(outputs) if part.cosine is not None]
    return _lowest(cosines)


def _rated_rows(outputs: Sequence[OutputFigures]) -> Iterator[PartFigures]:
    """Yield all parts, outputs without parts, and outputs whose channels have a figure."""
    for output in outputs:
        yield from output.leaves
        if output.parts and output.whole.channels is not None:
            yield output.whole


def _lowest(values: Sequence[float]) -> float | None:
    """Return the lowest value, NaN if one is NaN; None without values."""
    if any(map(math.isnan, values)):
        return math.nan
    return min(values, default=None)


def pooled_noise(outputs: Sequence[OutputFigures]) -> Noise:
    """Return the noise of all floating-point outputs together."""
    noise = Noise()
    for output in outputs:
        noise.merge(output.whole.noise)
    return noise


def metric_names(outputs: Sequence[Output]) -> set[str]:
    """Return the names of metrics that a network's outputs and parts will have.

    Integers and values computed from constants have only a share of equal values.
    """
    names = set()
    for output in outputs:
        is_fixed = all(part.is_constant for part in output.parts)
        rows = {output.name: is_fixed}
        for part in output.parts:
            rows[part.name] = part.is_constant
            rows[part.index or part.name] = part.is_constant
        for name, is_constant in rows.items():
            is_rated = output.is_float and not is_constant
            figures = NAMED_FIGURES if is_rated else (_EQUAL,)
            names |= {f"{figure}[{name}]" for figure in figures}
            if output.sample_axis is None:
                names.discard(f"{WORST_SAMPLES}[{name}]")
        if output.order is not None:
            names |= {ROWS_KEPT, f"{ROWS_KEPT}[{output.name}]"}
    return names
