"""A quantized tensor as codes, and back, bit for bit; codes of a few bits packed. Rounds nothing that has no code.

A code is what a format's row stores of a value before it is scaled: an integer, or the value itself in `storage`.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantizer.numerics.blocks import blocks, check_scales, workspace
from quantizer.numerics.fake_cast import float_kernel
from quantizer.numerics.fake_quantize import integer_kernel, work_dtype
from quantizer.numerics.formats import FloatFormat, format_named
from quantizer.numerics.granularity import from_rows, to_rows

BYTE = 8


class Spec(Protocol):
    """What the codec reads of a `QuantizationSpec`, which it is not to know."""

    @property
    def dtype(self) -> str: ...
    @property
    def bit_width(self) -> int: ...
    @property
    def quant_min(self) -> int: ...
    @property
    def quant_max(self) -> int: ...
    @property
    def is_scaled(self) -> bool: ...
    @property
    def qscheme(self) -> str: ...
    @property
    def ch_axis(self) -> int | None: ...
    @property
    def group_size(self) -> int | None: ...


def encode(value: Tensor, spec: Spec, scale: Tensor, zero_point: Tensor) -> Tensor | None:
    """Return the codes that `decode` makes `value` of, in its shape; None where no codes give it back exactly.

    Args:
        value: floating point, what a quantizer of `spec` gave: rounding it again only undoes the last bits.
        spec: its format and granularity.
        scale: float32, of `granularity.scale_shape`; not read for formats without a scale, nor is the next.
        zero_point: int32, same shape.
    """
    if value.isnan().any():
        return None
    codes = _codes(value, spec, scale, zero_point)
    return codes if torch.equal(decode(codes, spec, scale, zero_point, value.dtype), value) else None


def decode(codes: Tensor, spec: Spec, scale: Tensor, zero_point: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of codes in `dtype`, as a quantizer of `spec` computes them; arguments as for `encode`."""
    if not spec.is_scaled:
        return codes.to(dtype)
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    wide = spec.dtype == "int" and work_dtype(spec.quant_min, spec.quant_max) == torch.float64
    work = torch.float64 if wide or dtype == torch.float64 else torch.float32
    rows = to_rows(codes.to(work), *cut)
    rows = rows.sub_(zero_point.reshape(-1, 1)) if spec.dtype == "int" else rows.div_(format_named(spec.dtype).factor)
    return from_rows(rows.mul_(scale.reshape(-1, 1).to(work)), tuple(codes.shape), *cut).to(dtype).contiguous()


def bits_of(spec: Spec) -> int:
    """Return the bits of one code. Raises ValueError for a format that has no row."""
    return spec.bit_width if spec.dtype == "int" else format_named(spec.dtype).bits


def pack(codes: Tensor, spec: Spec) -> Tensor:
    """Return codes as files hold them: those of fewer than 8 bits as one stream of `pack_bits`, others as they are."""
    bits = bits_of(spec)
    if bits >= BYTE:
        return codes.contiguous()
    flat = codes.reshape(-1).contiguous().view(torch.uint8)
    if codes.is_floating_point():
        return pack_bits(_numbers(format_named(spec.dtype))[flat.int()], bits)
    return pack_bits(flat + _offset(codes.dtype, bits), bits)


def unpack(stored: Tensor, spec: Spec, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the codes of a tensor of `shape` that `pack` was given."""
    bits = bits_of(spec)
    if bits >= BYTE:
        return stored
    flat = unpack_bits(stored, bits, torch.Size(shape).numel())
    dtype = _storage(spec)
    if dtype.is_floating_point:
        return _patterns(format_named(spec.dtype))[flat.int()].view(shape)
    return (flat - _offset(dtype, bits)).view(dtype).view(shape)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return rows of codes as streams of bits, the first code in the lowest bits of the first byte.

    Args:
        codes: uint8 [..., n], each below 2^bits: signed codes with 2^(bits - 1) added.
        bits: at most 8.

    Returns:
        uint8 [..., ceil(n * bits / 8)]. Filled up to words and read as int32 it is the order of compressed-tensors'
        `pack-quantized` format; of 4 bits also that of ONNX.

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist()
    [33, 3]
    """
    length = codes.shape[-1]
    word = _joined(pad(codes, (0, -length % BYTE)), BYTE, bits)  # 8 codes take as many bytes as a code has bits
    stream = torch.stack([word >> BYTE * k & 255 for k in range(bits)], -1).to(torch.uint8)
    return stream.flatten(-2)[..., : -(-length * bits // BYTE)].contiguous()


def unpack_bits(stream: Tensor, bits: int, length: int) -> Tensor:
    """Return the `length` codes of each row that `pack_bits` was given.

    >>> unpack_bits(torch.tensor([33, 3], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    word = _joined(pad(stream, (0, -stream.shape[-1] % bits)), bits, BYTE)
    codes = torch.stack([word >> bits * k & (1 << bits) - 1 for k in range(BYTE)], -1).to(torch.uint8)
    return codes.flatten(-2)[..., :length].contiguous()


def _joined(numbers: Tensor, count: int, bits: int) -> Tensor:
    """Each `count` numbers of so many bits along the last axis as one int64, the first in the lowest bits."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, count)
    word = parts[..., 0].to(torch.int64)
    for k in range(1, count):
        word |= parts[..., k].to(torch.int64) << bits * k
    return word


def code_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the smallest integer dtype that holds a range, but not uint16, in which torch can compute little.

    >>> code_dtype(-8, 7), code_dtype(0, 255), code_dtype(0, 65535)
    (torch.int8, torch.uint8, torch.int32)
    """
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        if info.min <= quant_min and quant_max <= info.max:
            return dtype
    return torch.int64


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Return the integer codes of `x` in `code_dtype`; arguments as for `fake_quantize_`.

    Raises ValueError if `x` holds NaN, which has no code.

    >>> quantize(torch.tensor([-9.0, 0.74]), torch.tensor(0.5), torch.tensor(3), 0, 15, "half_even")
    tensor([0, 4], dtype=torch.uint8)
    """
    check_scales(x, scale, zero_point, ch_axis)
    kernel = integer_kernel(quant_min, quant_max, round_mode)
    work = workspace(x.clone(), work_dtype(quant_min, quant_max))
    for block, s, z in blocks(work, scale, zero_point, ch_axis):
        kernel(block.div_(s), z).add_(z)
    if work.isnan().any():
        raise ValueError(f"{int(work.isnan().sum())} of {work.numel()} values are NaN and have no code.")
    return work.to(code_dtype(quant_min, quant_max))


def _codes(value: Tensor, spec: Spec, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The codes nearest to a tensor without NaN."""
    if not spec.is_scaled:
        return value.to(_storage(spec))
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    rows, scale, zero_point = to_rows(value, *cut), scale.reshape(-1), zero_point.reshape(-1)
    if spec.dtype == "int":
        codes = quantize(rows, scale, zero_point, spec.quant_min, spec.quant_max, "half_even", ch_axis=0)
    elif (row := format_named(spec.dtype)).storage.is_floating_point:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        codes = float_kernel(spec.dtype)(wide / scale[:, None], 0).to(row.storage)
    else:
        span = round(row.largest * row.factor)
        codes = quantize(rows, scale / row.factor, torch.zeros_like(zero_point), -span, span, "half_even", ch_axis=0)
    return from_rows(codes, tuple(value.shape), *cut).contiguous()


def _storage(spec: Spec) -> torch.dtype:
    return code_dtype(spec.quant_min, spec.quant_max) if spec.dtype == "int" else format_named(spec.dtype).storage


def _offset(dtype: torch.dtype, bits: int) -> int:
    """What is added to a code for it not to be negative; bytes wrap around."""
    return 1 << (bits - 1) if dtype.is_signed else 0


@cache
def _patterns(row: FloatFormat) -> Tensor:
    """The value of each code of a format with few bits, sign, exponent and mantissa from the highest bit, in `storage`.

    Those of fp4 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a minus.
    """
    assert row.mantissa is not None
    parts = [divmod(code, 1 << row.mantissa) for code in range(1 << (row.bits - 1))]
    finest = 2.0 ** (row.least - row.mantissa)
    magnitudes = [
        finest * (mantissa if not exponent else ((1 << row.mantissa) + mantissa) * 2.0 ** (exponent - 1))
        for exponent, mantissa in parts
    ]
    return torch.tensor([*magnitudes, *(-value for value in magnitudes)]).to(row.storage)


@cache
def _numbers(row: FloatFormat) -> Tensor:
    """The inverse of `_patterns`: for each byte of `storage` the code of its value, uint8 [256]."""
    numbers = torch.zeros(256, dtype=torch.uint8)
    values = _patterns(row).view(torch.uint8)
    numbers[values.int()] = torch.arange(len(values), dtype=torch.uint8)
    return numbers
