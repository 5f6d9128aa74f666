"""What calibration observes besides ranges: the mean of each channel, parameters beyond their
format, and the few samples that stretch the range of an input. Such samples cost all others
their resolution.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.comparison.samples import sample_name
from quantizer.config.roles import is_parameter
from quantizer.config.wording import counted, first_names
from quantizer.graph.ir import Node
from quantizer.numerics.formats import format_named
from quantizer.observers import code_range_of, largest_by_index
from quantizer.plan.model import Plan
from quantizer.sources.batches import Batch

logger = logging.getLogger(__name__)

_STRETCH = 4.0
"""A range that is so many times as wide as the other samples need takes two bits from them."""
_FEW = 20
"""At most one of so many samples is few. One sample always is."""
_MIN_SAMPLES = 4
_MAX_NAMED = 4


@dataclass(frozen=True)
class _Range:
    """The range of an input that was chosen: a name for people, and its largest magnitude."""

    name: str
    end: float


@dataclass
class _Samples:
    """The samples of one input: the largest magnitude and the name of each."""

    magnitudes: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def sentence(self, chosen: _Range) -> str | None:
        """Return a sentence about samples that stretch a range; None if there are none."""
        magnitudes = torch.cat(self.magnitudes).cpu()
        count = len(magnitudes)
        if count < _MIN_SAMPLES:
            return None
        few = max(1, count // _FEW)
        ordered = magnitudes.sort(descending=True).values
        largest = float(ordered[0])
        # Some methods clip what is far
        end = min(chosen.end, largest)
        usual_end = float(ordered[few])
        if not 0 < _STRETCH * usual_end < end:
            return None
        far = magnitudes > _STRETCH * usual_end
        names = [self.names[index] for index in far.nonzero().flatten().tolist()]
        verb = "stretches" if len(names) == 1 else "stretch"
        text = f"{counted(len(names), 'sample')} of {count} {verb} the range of {chosen.name} "
        text += f"from {usual_end:.3g} to {end:.3g}, {end / usual_end:.3g} times as far: "
        text += first_names(names, _MAX_NAMED)
        return f"{text} (leave out what is not in real inputs: all others lose resolution)"


class InputMagnitudes:
    """The largest magnitude of each sample, for each floating-point input."""

    def __init__(self) -> None:
        self._inputs: dict[str, _Samples] = {}

    def add(self, batch: Batch) -> None:
        """Add a batch with its number. Inputs without an axis of samples are left out."""
        count = batch.size
        numbers: Sequence[int] = batch.rows or range(count)
        names = []
        for number in numbers:
            name = sample_name(batch.number or 0, number)
            names.append(name)
        for name, tensor in batch.tensors():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if tensor.shape[:1] != (count,):
                continue
            samples = self._inputs.setdefault(name, _Samples())
            magnitudes = largest_by_index(tensor)
            samples.magnitudes.append(magnitudes)
            samples.names += names

    def sentences(self, plan: Plan, solution: Solution) -> Iterator[str]:
        """Yield a sentence for each input whose range a few samples stretch.

        Args:
            plan: of the calibration.
            solution: with the ranges that were found.
        """
        ranges = _ranges(plan, solution)
        for name, samples in self._inputs.items():
            chosen = ranges.get(name)
            if not plan.graph.input_paths:
                # Without a trace it is not known which tensors are inputs
                chosen = _Range(name, math.inf)
            text = None if chosen is None else samples.sentence(chosen)
            if text is not None:
                yield text


def _ranges(plan: Plan, solution: Solution) -> Mapping[str, _Range]:
    """Return the range of each quantized input, by its name in a batch."""
    graph = plan.graph
    names: dict[str, str] = {}
    inputs = [node.name for node in graph.nodes if node.op == "input"]
    for node, path in zip(inputs, graph.input_paths, strict=False):
        names[node] = _name_in_batch(path)
    ranges: dict[str, _Range] = {}
    for key, tensor in plan.tensors.items():
        name = names.get(tensor.source)
        if name is None or not tensor.is_calibrated or tensor.spec.is_dynamic:
            continue
        codes = code_range_of(tensor.spec)
        scale = solution.tensors[key].scale
        end = codes.largest * float(scale.abs().max())
        if name in ranges:
            end = max(end, ranges[name].end)
        ranges[name] = _Range(tensor.source, end)
    return ranges


def _name_in_batch(path: tuple[Any, ...]) -> str:
    """Return what `Batch.tensors` calls an input.

    >>> _name_in_batch((0, 0)), _name_in_batch((1, "pixels"))
    ('args[0]', "kwargs['pixels']")
    """
    is_keyword, *keys = path
    name = "kwargs" if is_keyword else "args"
    for key in keys:
        name += f"[{key!r}]"
    return name


def warn_of_saturation(plan: Plan) -> None:
    """Warn of parameters with values that a format without a scale cannot represent."""
    for key, tensor in plan.tensors.items():
        if not is_parameter(tensor.role) or tensor.spec.is_scaled:
            continue
        value = plan.parameter(key)
        dtype = tensor.spec.dtype
        largest = format_named(dtype).largest
        is_beyond = value.isfinite() & (value.abs() > largest)
        count = int(is_beyond.sum())
        if count:
            logger.warning(
                f"{tensor.role} of {tensor.layer}: {count} of {value.numel()} values are "
                f"beyond {largest:g}, the largest of {dtype}, and are clipped to it; bfloat16 "
                "has the range of float32"
            )


def channel_axis(node: Node) -> int:
    """Return the axis of a layer's channels in its output, counted from the end, as the batch
    axis may be missing. The layer must have one bias.
    """
    axis = node.row.channels
    assert axis is not None
    if axis < 0:
        return axis
    assert node.shape is not None  # the output of a batch norm is one tensor
    return axis - node.rank


class ChannelMean:
    """Collects the mean of each channel. A batch is summed in float32 at least, and batches are
    added in float64.

    >>> mean = ChannelMean(ch_axis=-1)
    >>> mean.observe(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> mean.mean().tolist()
    [2.0, 20.0]

    Attributes:
        sums: how many values a channel had after so many batches, and their sums, float64
            [channels]. The numbers of batches are those that `next_kept` gives.
    """

    def __init__(self, ch_axis: int) -> None:
        self.ch_axis = ch_axis
        self.sums: dict[int, tuple[int, Tensor]] = {}
        # Batches, values per channel, sums
        self._now = (0, 0, torch.zeros(1, dtype=torch.float64))
        self._before = self._now

    def observe(self, x: Tensor) -> None:
        """Take in one batch, with channels along `ch_axis`."""
        self.add(self.sum_of(x).cpu(), x.numel())

    def sum_of(self, x: Tensor) -> Tensor:
        """Return the sum of each channel of a batch, on its device."""
        others = [axis for axis in range(-x.ndim, 0) if axis != self.ch_axis]
        # Reading all in float64 would be ten times as slow
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.sum(others, dtype=dtype) if others else x.clone()

    def add(self, sums: Tensor, values: int) -> None:
        """Take in the sums of a batch that has so many values."""
        self._add(1, values // max(len(sums), 1), sums.double())

    def merge(self, other: ChannelMean) -> None:
        """Take in what another has seen. Merging single batches in order gives the same as
        observing them.
        """
        self._add(*other._now)

    def _add(self, batches: int, count: int, sums: Tensor) -> None:
        self._before = self._now
        batches += self._before[0]
        count += self._before[1]
        sums = self._before[2] + sums
        self._now = (batches, count, sums)
        if batches > self._before[0] and batches == next_kept(batches - 1):
            self.sums[batches] = (count, sums)

    @property
    def batches(self) -> int:
        """Return how many it has taken in."""
        return self._now[0]

    @property
    def count(self) -> int:
        """Return how many values a channel had."""
        return self._now[1]

    def mean(self) -> Tensor:
        """Return the mean, float64 [channels]; NaN if no value was observed."""
        return self.mean_after(self.batches)

    def mean_after(self, batches: int) -> Tensor:
        """Return the mean of the first `batches`, which are all or have their sums kept."""
        _, count, total = self._now
        if batches != self.batches:
            count, total = self.sums[batches]
        return total / count if count else total / 0

    def forget_after(self, batches: int) -> None:
        """Drop what came after the first `batches` batches. That is one at most, which was
        interrupted.
        """
        if self.batches > batches:
            self.sums.pop(self.batches, None)
            self._now = self._before

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: "batches" and "count", int64; "sum", float64 [channels]; and those
        of `sums`, "after", int64 [n, 2], and "sums", float64 [n, channels].
        """
        batches, count, total = self._now
        after = [(number, values) for number, (values, _) in self.sums.items()]
        sums = [total for _, total in self.sums.values()]
        return {
            "batches": torch.tensor(batches),
            "count": torch.tensor(count),
            "sum": total,
            "after": torch.tensor(after, dtype=torch.int64).reshape(-1, 2),
            "sums": torch.stack(sums) if sums else total.new_zeros(0, len(total)),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by a state of `state_dict`.

        Raises:
            ValueError: it is something else.
        """
        batches = int(state["batches"])
        count = int(state["count"])
        total = state["sum"].double()
        is_count = min(batches, count) >= 0 and bool(batches) == bool(count)
        if not is_count or total.dim() != 1 or not total.isfinite().all():
            raise ValueError(
                f"the sum of {count} outputs in {batches} batches is not a sum of finite values"
            )
        self._now = (batches, count, total)
        self._before = self._now
        self.sums = {}
        for (number, values), sums in zip(state["after"].tolist(), state["sums"], strict=True):
            self.sums[number] = (values, sums)


def next_kept(batches: int) -> int:
    """Return after which number of batches, above `batches`, sums are kept next: after each of
    the first eight, and four times in each doubling from there.

    >>> next_kept(0), next_kept(7), next_kept(8), next_kept(16)
    (1, 8, 10, 20)
    """
    spacing = 1 << max(batches.bit_length() - 3, 0)
    return (batches // spacing + 1) * spacing
