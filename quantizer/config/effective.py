"""Reduce a spec to the fields that have an effect, so that specs can be compared by effect."""

from dataclasses import replace

from quantizer.config.model import QuantizationSpec


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
