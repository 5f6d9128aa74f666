"""What a user should hear of a model's parameters before they are quantized. Finds it out; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import shortened
from quantizer.numerics.formats import format_named
from quantizer.observers import Observer
from quantizer.plan.model import Key, Plan


def saturated(plan: Plan) -> Iterator[str]:
    """Which parameters have values that a cast without a scale cuts to the largest of its format, and how many."""
    for tensor in plan.tensors.values():
        if is_parameter(tensor.role) and not tensor.spec.is_scaled:
            node = plan.graph.by_name[tensor.layer]
            value = plan.graph.tensors[node.params[parameter_name(tensor.role)]]
            largest = format_named(tensor.spec.dtype).largest
            count = int((value.isfinite() & (value.abs() > largest)).sum())
            if count:
                yield (
                    f"{tensor.role} of {tensor.layer}: {count} of {value.numel()} values are beyond {largest:g}, the "
                    f"largest of {tensor.spec.dtype}, and become it; bfloat16 has float32's range"
                )


def dead_channels(observers: Mapping[Key, Observer]) -> Iterator[str]:
    """Which weights, per tensor or per channel, have scales that are for nothing but zeros."""
    found = []
    for (layer, role), observer in observers.items():
        if role == "weights" and observer.spec.qscheme in ("per_tensor", "per_channel"):
            zero = (observer.low == 0) & (observer.high == 0)
            if zero.any():
                found.append(f"{layer} ({int(zero.sum())} of {zero.numel()} scales)")
    if found:
        yield f"where all weights of a scale are zero it is 1, and they stay zero: {shortened(found)}"
