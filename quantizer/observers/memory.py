"""What an observer keeps of the batches: the range of each, or one histogram of all of them.
Keeps no values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.distributed import in_turn
from quantizer.numerics.histogram import Histogram
from quantizer.numerics.registry import lookup
from quantizer.observers.methods import METHODS, OF_VALUES
from quantizer.observers.observed_batch import (
    CountedBatches,
    Distribution,
    ObservedBatch,
    PooledBatches,
    Range,
    slices,
)

# Histograms of 4096 bins of each take 32 MB, the candidates of diffs 84 MB
ROWS_AT_ONCE = 1 << 10
FEW_ROWS = 16
"""Rows of which ranges can wait until the batch is through."""
ROOM = 16
"""Batches that there is room for at first."""


def memory_of(spec: QuantizationSpec) -> Memory:
    """Return an empty memory of the kind that the statistic asks for."""
    return PooledMemory(spec) if spec.statistic == POOLED else RangeMemory(spec)


def ranges(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the range that the spec's method gives each row."""
    return lookup(METHODS, spec.method, "calibration method")(values, spec)


@dataclass
class Memory(ABC):
    """What an observer of `spec` has seen."""

    spec: QuantizationSpec

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there was no batch yet."""

    @abstractmethod
    def add(self, x: Tensor, batch: ObservedBatch) -> None:
        """Take in a batch, whose values are `x`."""

    @abstractmethod
    def ranges(self) -> Range:
        """The ranges found, (B, R) each; one for all batches has B = 1."""

    @abstractmethod
    def extremes(self) -> Range:
        """The least and the greatest value seen in each row, (R,) float64."""

    @abstractmethod
    def forget_after(self, batches: int) -> None:
        """Drop what came after the first `batches` batches."""

    @abstractmethod
    def merge(self, *others: Memory) -> None:
        """Take in what others of this kind have; batches of several in turn, one of each."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """All there is to keep."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen; ValueError if it is something else."""

    @abstractmethod
    def take_up(self, other: Memory, beside: Memory | None) -> None:
        """Hold, if new, what there would be had this one seen the batches of `other`, of any
        kind, in its place.

        Args:
            other: what saw them.
            beside: what kept a histogram of the same values, if anything did.

        Raises:
            LookupError: that cannot be told; what is missing.
        """

    @abstractmethod
    def put_together(self, parts: Sequence[tuple[Memory, float]]) -> None:
        """Hold, if new, what there would be had this one seen the values of all parts in one
        tensor.

        Args:
            parts: memories of this spec that saw the same batches, and what their values are
                multiplied with, powers of two.
        """

    @abstractmethod
    def set_aside(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Hold what grows with the rows as `keep` gives it back, for as long as nothing is
        asked for.
        """


class RangeMemory(Memory):
    """Of each batch the method's low and high, the least and the greatest value, each (R,).

    All are in one tensor with room for more: small ones that stay, a few for each batch, would
    lie between the large values of a pass and keep the C library from using their memory again,
    which took three times as much.
    """

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec)
        self._kept, self._count = torch.empty(0, 4, 0, dtype=torch.float64), 0
        self._open: CountedBatches | None = None
        self._counts: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return not self._count

    def add(self, x: Tensor, batch: ObservedBatch) -> None:
        find_ranges([self])
        rows = len(batch.low)
        if self._count == len(self._kept):
            room = max(self._count, ROOM if rows < ROWS_AT_ONCE else 1)
            more = torch.empty(room, 4, rows, dtype=torch.float64)
            self._kept = torch.cat([self._seen, more]) if self._count else more
        self._kept[self._count, 2], self._kept[self._count, 3] = batch.low, batch.high
        self._count += 1
        if rows <= FEW_ROWS and self.spec.method not in OF_VALUES:
            self._open = self._counted(batch)
            return
        # maxmin reads no histogram, so it takes all rows at once
        parts = [batch] if self.spec.method == "maxmin" else batch.split(ROWS_AT_ONCE)
        found = [ranges(part, self.spec) for part in parts]
        self._found(*(torch.cat(ends) for ends in zip(*found, strict=True)))

    def _counted(self, batch: ObservedBatch) -> CountedBatches:
        """The batch without its values; its counts stay in one place, as small tensors of each
        batch would be in the way of large ones.
        """
        found = batch.counted()
        if self._counts is None or self._counts.shape != found.counts.shape:
            # As many as a sample has
            self._counts = torch.empty_like(found.counts, dtype=torch.int32)
        return replace(found, counts=self._counts.copy_(found.counts))

    def _found(self, low: Tensor, high: Tensor) -> None:
        """What the range of the last batch is."""
        self._open = None
        self._kept[self._count - 1, 0], self._kept[self._count - 1, 1] = low, high

    def ranges(self) -> Range:
        return self._seen[:, 0], self._seen[:, 1]

    def extremes(self) -> Range:
        return self._seen[:, 2].amin(0), self._seen[:, 3].amax(0)

    def forget_after(self, batches: int) -> None:
        if self._count > batches:
            self._count, self._open = batches, None

    def merge(self, *others: Memory) -> None:
        batches = in_turn([*other._seen] for other in others if isinstance(other, RangeMemory))
        if batches:
            self._hold(
                torch.cat(
                    [self._seen, torch.stack(batches)]
                    if self._count
                    else [torch.stack(batches)]
                )
            )

    def take_up(self, other: Memory, beside: Memory | None) -> None:
        """Extremes are kept whatever the method; of a histogram only the outermost ones of all
        batches are known.
        """
        spec, seen = self.spec, other.spec
        if isinstance(other, RangeMemory) and replace(seen, statistic=spec.statistic) == spec:
            self._hold(other._seen.clone())
        elif isinstance(other, RangeMemory) and spec.method == "maxmin":
            self._hold(other._seen[:, [2, 3, 2, 3]])
        elif isinstance(other, PooledMemory) and (spec.method, spec.statistic) == (
            "maxmin",
            "max",
        ):
            self._hold(torch.stack([*other.extremes(), *other.extremes()])[None])
        elif isinstance(other, PooledMemory):
            needs = f"{spec.statistic} of {spec.method} needs the range of each batch"
            raise LookupError(f"{needs}, and one histogram is kept")
        else:
            raise LookupError(
                f"{spec.method} needs a histogram of each batch, and the range of each is kept"
            )

    def put_together(self, parts: Sequence[tuple[Memory, float]]) -> None:
        """The outermost ends that any part has, batch by batch."""
        seen: list[Tensor] = []
        for part, factor in parts:
            assert isinstance(part, RangeMemory)
            seen.append(part._seen * factor)
        every = torch.stack(seen)
        low, high = every.amin(0), every.amax(0)
        self._hold(torch.stack([low[:, 0], high[:, 1], low[:, 2], high[:, 3]], 1))

    def set_aside(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._kept = keep(self._seen.clone())  # without the room for more

    def state_dict(self) -> dict[str, Tensor]:
        """One tensor "batches", float64 (B, 4, R), 32 bytes per batch and row; (0, 4, 0) if
        new.
        """
        return {"batches": self._seen.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        batches = state.get("batches")
        if (
            set(state) != {"batches"}
            or batches is None
            or batches.ndim != 3
            or batches.shape[1] != 4
        ):
            raise ValueError(
                'An observer\'s state is one tensor "batches" of shape (B, 4, R), not '
                f"{sorted(state)}."
            )
        self._hold(batches.double())

    @property
    def _seen(self) -> Tensor:
        """What is kept of the batches so far, (B, 4, R) float64."""
        find_ranges([self])
        return self._kept[: self._count]

    def _hold(self, batches: Tensor) -> None:
        self._kept, self._count, self._open = batches, len(batches), None


def find_ranges(memories: Iterable[Memory]) -> None:
    """Find the ranges of the last batches that are still open, all of one spec in one go.

    Whoever asks for anything finds them; of many tensors at once it takes a fraction of the
    time.
    """
    by_spec: dict[QuantizationSpec, list[RangeMemory]] = {}
    for memory in memories:
        if isinstance(memory, RangeMemory) and memory._open is not None:
            by_spec.setdefault(memory.spec, []).append(memory)
    for spec, alike in by_spec.items():
        opened = [memory._open for memory in alike if memory._open is not None]
        found = ranges(CountedBatches.stacked(opened), spec)
        rows = [len(each.low) for each in opened]
        for memory, *ends in zip(
            alike, *(torch.split(end, rows) for end in found), strict=True
        ):
            memory._found(*ends)


class PooledMemory(Memory):
    """One histogram of all batches but the last, which may still be dropped, and one of
    that.
    """

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec)
        self._pool: Histogram | None = None
        self._last: Histogram | None = None
        self._batches = 0

    @property
    def is_empty(self) -> bool:
        return self._all() is None

    def add(self, x: Tensor, batch: ObservedBatch) -> None:
        rows, weight = slices(x) if self.spec.has_one_scale else (batch.rows, 1)
        # A value far away may be one that is left out, and matters most.
        outermost = (
            None
            if batch.outermost is None or weight == 1
            else _wide(batch.outermost).to(rows.device)
        )
        last = Histogram.of(_wide(rows), batch.low, batch.high, weight=weight, beside=outermost)
        self._pool, self._last = self._all(), last
        self._batches += 1

    def ranges(self) -> Range:
        low, high = ranges(PooledBatches(self._pooled()), self.spec)
        return low[None], high[None]

    def extremes(self) -> Range:
        return self._pooled().low, self._pooled().high

    def forget_after(self, batches: int) -> None:
        if self._batches > batches:
            self._last = None
            self._batches -= 1

    def merge(self, *others: Memory) -> None:
        for other in others:
            assert isinstance(other, PooledMemory)
            found, self._batches = other._all(), self._batches + other._batches
            if found is not None:
                self._pool, self._last = self._all(), found

    def take_up(self, other: Memory, beside: Memory | None) -> None:
        kept = next((each for each in (other, beside) if isinstance(each, PooledMemory)), None)
        if kept is None or (other.spec.qscheme, self.spec.qscheme) != (
            "per_tensor",
            "per_tensor",
        ):
            raise LookupError(f"{self.spec.method} needs a histogram, and only ranges are kept")
        self._pool, self._last, self._batches = kept._all(), None, kept._batches

    def put_together(self, parts: Sequence[tuple[Memory, float]]) -> None:
        """One histogram of all parts; those of scaled values have the same counts."""
        for part, factor in parts:
            assert isinstance(part, PooledMemory)
            scaled = part._pooled().scaled(factor)
            self._pool = scaled if self._pool is None else self._pool.merge(scaled)
            self._batches = part._batches

    def set_aside(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Histograms stay where they are."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the histogram, and how many "batches" it is of; that alone if new."""
        found = self._all()
        return {
            "batches": torch.tensor(self._batches),
            **({} if found is None else found.to_tensors()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        tensors = dict(state)
        batches = tensors.pop("batches", None)
        if batches is None or batches.ndim:
            raise ValueError(
                'An observer\'s state is a histogram and the number of "batches", not '
                f"{sorted(state)}."
            )
        self._pool = Histogram.from_tensors(tensors) if tensors else None
        self._last, self._batches = None, int(batches)

    def _all(self) -> Histogram | None:
        if self._pool is None or self._last is None:
            return self._last if self._pool is None else self._pool
        return self._pool.merge(self._last)

    def _pooled(self) -> Histogram:
        found = self._all()
        assert found is not None
        return found


def _wide(rows: Tensor) -> Tensor:
    """Rows as a histogram takes them."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
