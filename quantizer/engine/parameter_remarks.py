"""What a user should hear of a model's parameters before they are quantized. Finds it out; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import shortened
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.numerics.granularity import to_rows
from quantizer.plan.model import Plan, TensorPlan


def saturated(plan: Plan) -> Iterator[str]:
    """Which parameters have values that a cast without a scale cuts to the largest of its format, and how many."""
    for tensor in plan.tensors.values():
        if is_parameter(tensor.role) and not tensor.spec.is_scaled:
            value = _value(plan, tensor)
            largest = FLOAT_FORMATS[tensor.spec.dtype].largest
            count = int((value.isfinite() & (value.abs() > largest)).sum())
            if count:
                yield (
                    f"{tensor.role} of {tensor.layer}: {count} of {value.numel()} values are beyond {largest:g}, the "
                    f"largest of {tensor.spec.dtype}, and become it; bfloat16 has float32's range"
                )


def dead_channels(plan: Plan) -> Iterator[str]:
    """Which weights, per tensor or per channel, have scales that are for nothing but zeros."""
    found = []
    for tensor in plan.tensors.values():
        if tensor.role == "weights" and tensor.spec.is_scaled and tensor.spec.qscheme in ("per_tensor", "per_channel"):
            rows = to_rows(_value(plan, tensor), tensor.spec.qscheme, tensor.spec.ch_axis)
            count = int((rows == 0).all(1).sum())
            if count:
                found.append(f"{tensor.layer} ({count} of {len(rows)} scales)")
    if found:
        yield f"where all weights of a scale are zero it is 1, and they stay zero: {shortened(found)}"


def _value(plan: Plan, tensor: TensorPlan) -> Tensor:
    """The parameter that is to be quantized."""
    return plan.graph.tensors[plan.graph.by_name[tensor.layer].params[parameter_name(tensor.role)]]
