"""Codes give back what a quantizer made, to the last bit, and a few bits of each are enough to
hold them.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.codes import (
    bits_of,
    decode,
    encode,
    pack,
    pack_bits,
    unpack,
    unpack_bits,
)
from quantizer.observers import Observer
from quantizer.tables import NUMBER_FORMATS

ONE, ZERO = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
KINDS: tuple[dict[str, bool], ...] = (
    {},
    {"symmetric": False},
    {"narrow_range": True},
    {"signed": False},
)
SPECS = [
    QuantizationSpec(bit_width=bits, **kind)
    for bits in (2, 3, 4, 5, 7, 8, 12, 16)
    for kind in KINDS
]  # type: ignore[arg-type]
SPECS += [QuantizationSpec(bit_width=32), QuantizationSpec(bit_width=32, narrow_range=True)]
SPECS += [QuantizationSpec(dtype=name) for name in NUMBER_FORMATS]
SPECS += [
    QuantizationSpec(dtype=name, scale_type="e8m0") for name in ("fp4", "mx_int8", "bfp16")
]
CUTS = [("per_tensor", None, None), ("per_channel", 0, None), ("per_channel", 1, None)]
CUTS += [("per_group", 1, 4), ("per_group", 0, -1)]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    cut=st.sampled_from(CUTS),
    mode=st.sampled_from(["half_even", "floor"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 99),
)
def test_codes_give_back_what_a_quantizer_made(
    spec: QuantizationSpec,
    cut: tuple[str, int | None, int | None],
    mode: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    words = {
        **spec.to_json(),
        "round_mode": mode,
        **dict(zip(("qscheme", "ch_axis", "group_size"), cut, strict=True)),
    }
    spec = QuantizationSpec(**words)
    value = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed)).to(dtype)
    value = value.abs() if spec.symmetric and not spec.signed else value
    scale, zero_point = ONE, ZERO
    if spec.is_scaled:
        observer = Observer(spec)
        observer.observe(value)
        scale, zero_point = observer.qparams().scale, observer.qparams().zero_point
    made = TensorQuantizer(spec, scale, zero_point)(value)
    codes = encode(made, spec, scale, zero_point)
    assert codes is not None
    stored = pack(codes, spec)
    bits = bits_of(spec)
    assert stored.numel() == (math.ceil(45 * bits / 8) if bits < 8 else 45)
    unpacked = unpack(stored, spec, codes.shape)
    assert unpacked.dtype == codes.dtype
    assert torch.equal(unpacked.double(), codes.double())
    assert torch.equal(decode(unpacked, spec, scale, zero_point, dtype=dtype), made)


@pytest.mark.parametrize("value", [0.26, math.nan, math.inf, 100.0])
def test_what_has_no_code_is_not_encoded(value: float) -> None:
    assert (
        encode(
            torch.tensor([0.5, value]), QuantizationSpec(bit_width=4), torch.tensor(0.25), ZERO
        )
        is None
    )
    assert (
        encode(
            torch.tensor([0.5, value]), QuantizationSpec(dtype="fp4"), torch.tensor(0.25), ZERO
        )
        is None
    )


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_row_is_one_stream_of_bits_the_first_code_lowest(bits: int) -> None:
    codes = torch.randint(
        0,
        1 << bits,
        (3, 2, 13),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(bits),
    )
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, 2, math.ceil(13 * bits / 8))
    for row, stream in zip(codes.view(-1, 13), packed.view(6, -1), strict=True):
        number = sum(code << bits * at for at, code in enumerate(row.tolist()))
        assert number == int.from_bytes(bytes(stream.tolist()), "little")
    assert torch.equal(unpack_bits(packed, bits, 13), codes)


def test_nothing_is_packed_into_nothing() -> None:
    assert unpack_bits(pack_bits(torch.empty(2, 0, dtype=torch.uint8), 3), 3, 0).shape == (2, 0)


def test_packed_integers_are_counted_from_the_least_that_the_bits_hold() -> None:
    for spec in (
        QuantizationSpec(bit_width=4),
        QuantizationSpec(bit_width=4, narrow_range=True),
    ):
        assert pack(torch.tensor([7, -3], dtype=torch.int8), spec).tolist() == [
            (7 + 8) | (-3 + 8) << 4
        ]
    unsigned = QuantizationSpec(bit_width=4, symmetric=False)
    assert pack(torch.tensor([7, 3], dtype=torch.uint8), unsigned).tolist() == [7 | 3 << 4]


def test_packed_small_floats_are_sign_exponent_and_mantissa() -> None:
    """OCP MX v1.0, 5.3.3: of fp4, 0 0.5 1 1.5 2 3 4 6 and the same with a minus."""
    values = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    spec = QuantizationSpec(dtype="fp4")
    codes = encode(torch.tensor([*values, *(-value for value in values)]), spec, ONE, ZERO)
    assert codes is not None
    assert unpack_bits(pack(codes, spec), 4, 14).tolist() == [*range(1, 8), *range(9, 16)]
    six = QuantizationSpec(dtype="fp6_e3m2")
    codes = encode(torch.tensor([0.0625, 0.25, 28.0, -28.0]), six, ONE, ZERO)
    assert codes is not None
    assert unpack_bits(pack(codes, six), 6, 4).tolist() == [
        0b000001,
        0b000100,
        0b011111,
        0b111111,
    ]


def test_a_format_without_a_row_is_an_error() -> None:
    with pytest.raises(
        ValueError, match='"fp5" is not a floating-point format; known are bfloat16'
    ):
        bits_of(QuantizationSpec(dtype="fp5"))
