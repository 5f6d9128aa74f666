"""Combines observers of several tensors as if they had seen these in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.histogram import Histogram
from quantizer.observers.memory import PooledMemory
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
    is_pooled = isinstance(combined._memory, PooledMemory)
    combined.load_state_dict(_pooled(parts) if is_pooled else _ranges(parts))
    return combined


def _ranges(parts: Parts) -> dict[str, Tensor]:
    """Return the state with the lowest low and the highest high of each batch."""
    scaled = [part.state_dict()["batches"] * factor for part, factor in parts]
    stacked = torch.stack(scaled)
    low = stacked.amin(0)
    high = stacked.amax(0)
    return {"batches": torch.stack([low[:, 0], high[:, 1], low[:, 2], high[:, 3]], 1)}


def _pooled(parts: Parts) -> dict[str, Tensor]:
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
