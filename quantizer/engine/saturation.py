"""What a cast without a scale cuts off a model's parameters. Finds it out; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.plan.model import Plan


def saturated(plan: Plan) -> Iterator[str]:
    """Which parameters have values that a cast without a scale cuts to the largest of its format, and how many."""
    for tensor in plan.tensors.values():
        if is_parameter(tensor.role) and not tensor.spec.is_scaled:
            node = plan.graph.by_name[tensor.layer]
            value = plan.graph.tensors[node.params[parameter_name(tensor.role)]]
            largest = FLOAT_FORMATS[tensor.spec.dtype].largest
            count = int((value.isfinite() & (value.abs() > largest)).sum())
            if count:
                yield (
                    f"{tensor.role} of {tensor.layer}: {count} of {value.numel()} values are beyond {largest:g}, the "
                    f"largest of {tensor.spec.dtype}, and become it; bfloat16 has float32's range"
                )
