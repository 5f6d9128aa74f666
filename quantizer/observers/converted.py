"""Finds what an observer would have seen of several tensors in one, or with another spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.histogram import Histogram
from quantizer.observers.memory import PooledMemory, RangeMemory
from quantizer.observers.observer import Observer

Parts = Sequence[tuple[Observer, float]]
"""Observers, and the powers of two that their values are multiplied by."""


def combine(spec: QuantizationSpec, parts: Parts) -> Observer:
    """Return the observer that would have seen several tensors in one, with one scale.

    Args:
        spec: the spec of all parts.
        parts: of the tensors, which saw the same batches.

    Raises:
        ValueError: a part has another spec, or several scales.
    """
    are_alike = all(part.spec == spec for part, _ in parts)
    if not spec.has_one_scale or not are_alike:
        raise ValueError(
            f"Observers can only be combined if all have this spec, with one scale: {spec}."
        )
    combined = Observer(spec)
    state = _combined_ranges
    if isinstance(combined._memory, PooledMemory):
        state = _combined_histograms
    combined.load_state_dict(state(parts))
    return combined


def _combined_ranges(parts: Parts) -> dict[str, Tensor]:
    """Return the state with the lowest low and the highest high of each batch."""
    scaled = [part.state_dict()["batches"] * factor for part, factor in parts]
    stacked = torch.stack(scaled)
    low = stacked.amin(0)
    high = stacked.amax(0)
    return {"batches": torch.stack([low[:, 0], high[:, 1], low[:, 2], high[:, 3]], 1)}


def _combined_histograms(parts: Parts) -> dict[str, Tensor]:
    """Return the state with the histograms of all parts. Scaled values have the same counts."""
    pool: Histogram | None = None
    state: dict[str, Tensor] = {}
    for part, factor in parts:
        state = part.state_dict()
        batches = state.pop("batches")
        scaled = Histogram.from_tensors(state).scaled(factor)
        pool = scaled if pool is None else pool.merge(scaled)
        state = {**pool.to_tensors(), "batches": batches}
    return state


def restated(
    observer: Observer, spec: QuantizationSpec, companion: Observer | None = None
) -> Observer:
    """Return the observer that would have seen the same batches for another spec of the same
    granularity.

    Args:
        observer: what has seen them.
        spec: with another method, percentage or statistic.
        companion: an observer of the same values that may have a histogram.

    Raises:
        ValueError: no range exists for this spec, or its granularity is another.
        LookupError: the statistics do not suffice. The message says what is missing.
    """
    if spec.cut != observer.spec.cut:
        raise ValueError(
            f"What was observed {observer.spec.qscheme} cannot be restated {spec.qscheme}."
        )
    other = Observer(spec)
    if isinstance(other._memory, RangeMemory):
        state = _restated_ranges(observer, spec)
    else:
        state = _restated_histogram(observer, spec, companion)
    other.load_state_dict(state)
    other._shape = observer._shape
    return other


def _restated_ranges(observer: Observer, spec: QuantizationSpec) -> dict[str, Tensor]:
    """Return the state with the range of each batch.

    From ranges of the same method, all is taken over. From other ranges, the method "maxmin"
    can use the extremes of each batch. From a histogram, it can use the extremes of all batches
    together, if the statistic is "max".
    """
    if isinstance(observer._memory, RangeMemory):
        state = observer.state_dict()
        if replace(observer.spec, statistic=spec.statistic) == spec:
            return state
        if spec.method == "maxmin":
            # The least and the greatest value are the range, too
            return {"batches": state["batches"][:, [2, 3, 2, 3]]}
        raise LookupError(
            f"{spec.method} needs a histogram of each batch, and the range of each is kept"
        )
    if (spec.method, spec.statistic) != ("maxmin", "max"):
        needs = f"{spec.statistic} of {spec.method} needs the range of each batch"
        raise LookupError(f"{needs}, and one histogram is kept")
    low, high = observer._memory.extremes()
    return {"batches": torch.stack([low, high, low, high])[None]}


def _restated_histogram(
    observer: Observer, spec: QuantizationSpec, companion: Observer | None
) -> dict[str, Tensor]:
    """Return the state with the histogram of the observer or its companion."""
    source = observer if isinstance(observer._memory, PooledMemory) else companion
    are_per_tensor = observer.spec.qscheme == spec.qscheme == "per_tensor"
    if source is None or not isinstance(source._memory, PooledMemory) or not are_per_tensor:
        raise LookupError(f"{spec.method} needs a histogram, and only ranges are kept")
    return source.state_dict()
