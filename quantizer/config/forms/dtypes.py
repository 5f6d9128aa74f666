"""The number formats of the hierarchical form, by the words that its files have for them."""

from quantizer.config.model import QuantizationSpec
from quantizer.tables import NUMBER_FORMATS

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


BLOCK_FORMATS = {
    row.word or name: row for name, row in NUMBER_FORMATS.items() if row.group_size
}
"""The formats that always have groups, by dtype."""

GROUP_SIZES = {"e8m0": 32, "e4m3": 16}
"""The values that share a scale of a `scale_format`, where neither the file nor the dtype
says.
"""
