"""The number formats of the hierarchical form, by the words that its files have for them."""

from dataclasses import dataclass

from quantizer.config.model import QuantizationSpec, ScaleKind, ScaleMode

INTEGERS = {
    **{f"int{bits}": (bits, True) for bits in (2, 3, 4, 5, 8, 16, 32)},
    **{f"uint{bits}": (bits, False) for bits in (4, 5, 8, 16)},
}
"""Bits and sign of each integer dtype."""


def integer_word(spec: QuantizationSpec) -> str:
    """Return the usual word for integer codes, whether or not the form has it.

    >>> integer_word(QuantizationSpec(bit_width=7, symmetric=False))
    'uint7'
    """
    sign = "" if spec.has_signed_codes else "u"
    return f"{sign}int{spec.bit_width}"


def dtype_word(spec: QuantizationSpec) -> str | None:
    """Return the form's word for integer codes, if it has one.

    Asymmetric codes, from 0 to 2^b-1, have the unsigned word where it exists.

    >>> dtype_word(QuantizationSpec(bit_width=3, symmetric=False))
    'int3'
    >>> dtype_word(QuantizationSpec(bit_width=7)) is None
    True
    """
    words = [integer_word(spec)]
    if not spec.symmetric:
        words.append(f"int{spec.bit_width}")
    return next((word for word in words if word in INTEGERS), None)


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks: how many values share a scale, and how it is found where the file
    does not say.
    """

    group_size: int
    scale_type: ScaleKind = "e8m0"
    scale_mode: ScaleMode = "floor"


BLOCK_FORMATS = {
    "mx": BlockFormat(32),
    "bfp16": BlockFormat(8, scale_mode="even"),
    "mx6": BlockFormat(16, "microexponent"),
    "mx9": BlockFormat(16, "microexponent"),
    "q4_k": BlockFormat(32, "superblock"),
    "q5_k": BlockFormat(32, "superblock"),
    "q6_k": BlockFormat(16, "superblock"),
    "iq4_nl": BlockFormat(32, "float"),
}
"""The dtypes that always are block formats. Source of 32: OCP Microscaling Formats v1.0,
section 5; of 16: "With Shared Microexponents, A Little Shifting Goes a Long Way" (arXiv
2302.08007), table 2; of the last four: ggml. bfp16's exponent is one up where the largest
value would round beyond it.
"""

SEARCHED_FORMATS = frozenset({"q4_k", "q5_k", "q6_k", "iq4_nl"})
"""The formats of llama.cpp, whose scales are searched where the file names no observer."""

GROUP_SIZES = {"e8m0": 32, "e4m3": 16}
"""The values that share a scale of a `scale_format`, where neither the file nor the dtype
says.
"""
