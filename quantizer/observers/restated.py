"""Finds what an observer would have seen with another spec."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.observers.memory import PooledMemory, RangeMemory
from quantizer.observers.observer import Observer


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
        state = _ranges(observer, spec)
    else:
        state = _histogram(observer, spec, companion)
    other.load_state_dict(state)
    other._shape = observer._shape
    return other


def _ranges(observer: Observer, spec: QuantizationSpec) -> dict[str, Tensor]:
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


def _histogram(
    observer: Observer, spec: QuantizationSpec, companion: Observer | None
) -> dict[str, Tensor]:
    """Return the state with the histogram of the observer or its companion."""
    source = observer if isinstance(observer._memory, PooledMemory) else companion
    are_per_tensor = observer.spec.qscheme == spec.qscheme == "per_tensor"
    if source is None or not isinstance(source._memory, PooledMemory) or not are_per_tensor:
        raise LookupError(f"{spec.method} needs a histogram, and only ranges are kept")
    return source.state_dict()
