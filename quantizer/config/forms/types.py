"""The enumerations of the hierarchical form, by the names that its files and its Python API
use, and what its words for number formats mean.
"""

from enum import Enum

from quantizer.config.model import QuantizationSpec
from quantizer.tables import HAS_FOREIGN_ROWS, NUMBER_FORMATS


class _Named(Enum):
    """An enumeration whose members are written in JSON by their names."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Dtype(_Named):
    """Number formats. `mx` is a block format whose elements `mx_element_dtype` names, `mx6` and
    `mx9` have exponents of pairs, too. `q4_k` to `iq4_nl` are those of llama.cpp. `float32`
    (ours) leaves a tensor in float that a wider level quantizes.
    """

    int2 = "int2"
    int3 = "int3"
    int4 = "int4"
    uint4 = "uint4"
    int5 = "int5"
    uint5 = "uint5"
    int8 = "int8"
    uint8 = "uint8"
    int16 = "int16"
    uint16 = "uint16"
    int32 = "int32"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    mx = "mx"
    mx6 = "mx6"
    mx9 = "mx9"
    bfp16 = "bfp16"
    q4_k = "q4_k"
    q5_k = "q5_k"
    q6_k = "q6_k"
    iq4_nl = "iq4_nl"


if HAS_FOREIGN_ROWS:
    _members = {member.name: member.value for member in Dtype}
    _members |= {row.word or name: row.word or name for name, row in NUMBER_FORMATS.items()}
    Dtype = _Named("Dtype", _members)  # type: ignore[misc,assignment,call-arg]


class QSchemeType(_Named):
    """How many scales a tensor has; `per_block` gives each square of a matrix one, `per_token`
    (ours) each row of features, in convolutions each sample.
    """

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_token = "per_token"
    per_block = "per_block"


class RoundType(_Named):
    """`round`: ties away from zero; `floor`: toward minus infinity; `half_even`, `half_up`,
    `half_down`: ties only.
    """

    round = "std_round"
    floor = "floor"
    half_even = "half_even"
    half_up = "half_up"
    half_down = "half_down"


class ScaleType(_Named):
    """Whether a scale is any float or a power of two."""

    float = "float"
    pof2 = "poweroftwo"


class DeviceType(_Named):
    """Where the quantized model is to run."""

    CPU = "CPU"
    GPU = "GPU"
    IPU = "IPU"


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
