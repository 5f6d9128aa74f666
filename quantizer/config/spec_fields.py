"""Decide which fields of a spec have an effect, and which of them a narrower level inherits."""

from dataclasses import replace

from quantizer.config.model import CAST_ONLY, QuantizationSpec, Role, Sourced


def effective(spec: QuantizationSpec) -> QuantizationSpec:
    """Return the spec with defaults for the fields that nothing reads: equal results give equal
    codes.

    >>> effective(QuantizationSpec(percentage=99)) == QuantizationSpec()
    True
    """
    if not spec.is_scaled:
        return QuantizationSpec(spec.dtype)
    if not spec.has_signed_codes:
        spec = replace(spec, signed=False, narrow_range=False)
    if spec.method != "percentile":
        spec = replace(spec, percentage=QuantizationSpec.percentage)
    if not spec.has_symmetric_scale:
        spec = replace(spec, symmetric_scale=QuantizationSpec.symmetric_scale)
    return spec


def is_foreign(dtype: str | None, other: str | None) -> bool:
    """Return whether one of two dtypes of `QuantizationSpec` is an integer format and the other
    a scaled floating-point format.

    >>> is_foreign("int", "fp8_e4m3")
    True
    >>> is_foreign("fp4", "fp8_e4m3"), is_foreign("int", "float16")
    (False, False)
    """
    scaled = {dtype, other} - CAST_ONLY - {None}
    return len(scaled) == 2 and "int" in scaled


def other_weight_axis(axis: Sourced, role: Role) -> Sourced | None:
    """Return the other one of a weight's first two axes.

    Groups of a channel run along the other axis than the channels. Return None for other axes
    and roles, of which it is not known.
    """
    if role != "weights" or axis.value not in (0, 1):
        return None
    return Sourced(1 - axis.value, axis.place)
