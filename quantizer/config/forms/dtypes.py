"""The number formats of the hierarchical form by the words that its files have for them. No
tensors.
"""

from dataclasses import dataclass

from quantizer.config.model import QuantizationSpec, ScaleKind, ScaleMode

INTEGERS = {
    f"{sign}int{bits}": (bits, not sign)
    for sign, widths in (("", (2, 3, 4, 5, 8, 16, 32)), ("u", (4, 5, 8, 16)))
    for bits in widths
}
"""Bits and sign of each integer dtype."""


def dtype_word(spec: QuantizationSpec) -> str | None:
    """The word for integer codes, if there is one; codes from 0 to 2^b-1 have the unsigned one
    where it exists.

    >>> (
    ...     dtype_word(QuantizationSpec(bit_width=3, symmetric=False)),
    ...     dtype_word(QuantizationSpec(bit_width=7)),
    ... )
    ('int3', None)
    """
    is_signed = spec.signed and spec.symmetric
    words = [f"int{spec.bit_width}"] if is_signed else [f"uint{spec.bit_width}"]
    words += [f"int{spec.bit_width}"] if not spec.symmetric else []
    return next((word for word in words if word in INTEGERS), None)


@dataclass(frozen=True)
class BlockFormat:
    """A format with a shared exponent: the values that share it and how it is found where the
    file does not say.
    """

    group_size: int
    scale_type: ScaleKind = "e8m0"
    scale_mode: ScaleMode = "floor"


BLOCK_FORMATS = {
    "mx": BlockFormat(32),
    "bfp16": BlockFormat(8, scale_mode="even"),
    "mx6": BlockFormat(16, "microexponent"),
    "mx9": BlockFormat(16, "microexponent"),
}
"""The dtypes that always are block formats. Source of 32: OCP Microscaling Formats v1.0,
section 5; of 16: "With Shared Microexponents, A Little Shifting Goes a Long Way" (arXiv
2302.08007), table 2. bfp16's exponent is one up where the largest value would round beyond
it.
"""

GROUP_SIZES = {"e8m0": 32, "e4m3": 16}
"""The values that share a scale of a `scale_format`, where neither the file nor the dtype
says.
"""
