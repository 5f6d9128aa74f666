"""Finds the few calibration samples that stretch the range of an input, at the cost of the
resolution of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.comparison.sample_noise import sample_name
from quantizer.config.wording import counted, first_names
from quantizer.observers import code_range_of, largest_by_index
from quantizer.plan.model import Plan
from quantizer.sources.batches import Batch

_STRETCH = 4.0
"""A range that is so many times as wide as the other samples need takes two bits from them."""
_FEW_SHARE = 20
"""At most one of so many samples counts as few, and at least one does."""
_MIN_SAMPLES = 4
_MAX_NAMED = 4


class InputMagnitudes:
    """The largest magnitude of each sample, for each floating-point input."""

    def __init__(self) -> None:
        self._magnitudes: dict[str, list[Tensor]] = {}
        self._samples: dict[str, list[tuple[int, int]]] = {}

    def add(self, batch: Batch) -> None:
        """Add a batch with its number. Inputs without an axis of samples are left out."""
        samples = batch.rows or range(batch.size)
        for name, tensor in batch.tensors():
            is_sampled = tensor.dim() > 0 and tensor.shape[0] == batch.size
            if not is_sampled or not tensor.is_floating_point() or not tensor.numel():
                continue
            largest = largest_by_index(tensor)
            self._magnitudes.setdefault(name, []).append(largest)
            names = self._samples.setdefault(name, [])
            names += [(batch.number or 0, sample) for sample in samples]

    def sentences(self, plan: Plan, solution: Solution) -> Iterator[str]:
        """Yield a sentence for each input whose range a few samples stretch.

        Args:
            plan: of the calibration. Without a trace it does not say which tensors are inputs.
            solution: with the ranges that were found.
        """
        chosen = _largest_by_input(plan, solution)
        for name, parts in self._magnitudes.items():
            label, range_end = name, torch.inf
            if chosen is not None:
                if name not in chosen:
                    continue
                label, range_end = chosen[name]
            magnitudes = torch.cat(parts)
            count = len(magnitudes)
            if count < _MIN_SAMPLES:
                continue
            ordered = magnitudes.sort(descending=True).values
            rest = float(ordered[max(1, count // _FEW_SHARE)])
            end = min(range_end, float(ordered[0]))
            if not 0 < _STRETCH * rest < end:
                continue
            far = (magnitudes > _STRETCH * rest).nonzero().flatten().tolist()
            names = [sample_name(*self._samples[name][index]) for index in far]
            stretch = "stretches" if len(far) == 1 else "stretch"
            yield (
                f"{counted(len(far), 'sample')} of {count} {stretch} the range of {label} "
                f"{end / rest:.3g} times, to {end:.3g}; the others end at {rest:.3g}: "
                f"{first_names(names, _MAX_NAMED)} (leave out what does not occur in use: it "
                "costs all other samples their resolution)"
            )


def _largest_by_input(plan: Plan, solution: Solution) -> dict[str, tuple[str, float]] | None:
    """Return for each quantized input, by its name in a batch, its layer and the end of its
    range. None without a trace.
    """
    graph = plan.graph
    if not graph.input_paths:
        return None
    inputs = [node.name for node in graph.nodes if node.op == "input"]
    names = dict(zip(inputs, map(_name_in_batch, graph.input_paths), strict=True))
    largest: dict[str, tuple[str, float]] = {}
    for key, tensor in plan.tensors.items():
        if tensor.source not in names or not tensor.is_calibrated or tensor.spec.is_dynamic:
            continue
        end = code_range_of(tensor.spec).largest * float(
            solution.tensors[key].scale.abs().max()
        )
        name = names[tensor.source]
        _, before = largest.get(name, ("", 0.0))
        largest[name] = (tensor.source, max(before, end))
    return largest


def _name_in_batch(path: tuple[Any, ...]) -> str:
    """Return what `Batch.tensors` calls an input.

    >>> _name_in_batch((0, 0)), _name_in_batch((1, "pixels"))
    ('args[0]', "kwargs['pixels']")
    """
    kind, *keys = path
    name = "kwargs" if kind else "args"
    return name + "".join(f"[{key!r}]" for key in keys)
