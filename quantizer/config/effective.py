"""What of a spec has an effect, so that two specs can be told apart by what they do."""

from dataclasses import replace

from quantizer.config.model import QuantizationSpec


def effective(spec: QuantizationSpec) -> QuantizationSpec:
    """The spec with defaults for the fields that nothing reads: equal ones give equal codes.

    >>> effective(QuantizationSpec(percentage=99)) == QuantizationSpec()
    True
    """
    if not spec.is_scaled:
        return QuantizationSpec(spec.dtype)
    usual, is_signed = QuantizationSpec(), spec.signed and spec.symmetric
    return replace(
        spec,
        signed=is_signed,
        narrow_range=spec.narrow_range and is_signed,
        percentage=spec.percentage if spec.method == "percentile" else usual.percentage,
        symmetric_scale=spec.symmetric_scale
        if spec.has_symmetric_scale
        else usual.symmetric_scale,
    )
