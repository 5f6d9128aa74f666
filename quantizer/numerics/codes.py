"""A quantized tensor as codes, and back, bit for bit; codes of a few bits packed. Rounds
nothing that has no code.

A code is what a format's row stores of a value before it is scaled: an integer, or the value
itself in `storage`.
"""

import math
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantizer.numerics.blocks import BLOCK, blocks, workspace
from quantizer.numerics.fake_quantize import float_kernel, integer_kernel, work_dtype
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
    def cut(self) -> tuple[str, int | None, int | None, int]: ...


def encode(value: Tensor, spec: Spec, scale: Tensor, zero_point: Tensor) -> Tensor | None:
    """Return the codes that `decode` makes `value` of, in its shape; None where no codes give
    it back exactly.

    Args:
        value: floating point, what a quantizer of `spec` gave: rounding it again only undoes
            the last bits.
        spec: its format and granularity.
        scale: float32, of `granularity.scale_shape`; not read for formats without a scale, nor
            is the next.
        zero_point: int32, same shape.
    """
    storage = storage_dtype(spec)
    if not spec.is_scaled:
        codes = value.to(storage)
        return codes if torch.equal(codes.to(value.dtype), value) else None
    cut = spec.cut
    rows, each = (
        workspace(to_rows(value, *cut), work_dtype_of(spec, value.dtype)),
        (scale.reshape(-1), zero_point.reshape(-1)),
    )
    codes, factor = torch.empty_like(rows, dtype=storage), _factor(spec)
    kernel = (
        float_kernel(spec.dtype)
        if factor
        else integer_kernel(spec.quant_min, spec.quant_max, "half_even")
    )
    for x, part, s, z in blocks(rows, codes, *each, ch_axis=0):
        code = kernel(z)(x / s)
        part.copy_(code.mul_(factor) if factor else code.add_(z))
        restored = part.to(x.dtype).div_(factor) if factor else part.to(x.dtype).sub_(z)
        if not torch.equal(restored.mul_(s).to(value.dtype), x.to(value.dtype)):
            return None
    return from_rows(codes, tuple(value.shape), *cut).contiguous()


def decode(
    codes: Tensor,
    spec: Spec,
    scale: Tensor,
    zero_point: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values of codes in `dtype`, as a quantizer of `spec` computes them; arguments
    as for `encode`.
    """
    if not spec.is_scaled:
        return codes.to(dtype)
    cut = spec.cut
    work, factor = work_dtype_of(spec, dtype), _factor(spec)
    rows = to_rows(codes.to(work), *cut)
    rows = rows.div_(factor) if factor else rows.sub_(zero_point.reshape(-1, 1))
    return (
        from_rows(rows.mul_(scale.reshape(-1, 1).to(work)), tuple(codes.shape), *cut)
        .to(dtype)
        .contiguous()
    )


def bits_of(spec: Spec) -> int:
    """Return the bits of one code.

    Raises:
        ValueError: its format has no row.
    """
    return spec.bit_width if spec.dtype == "int" else format_named(spec.dtype).bits


def pack(codes: Tensor, spec: Spec) -> Tensor:
    """Return codes as files hold them: those of fewer than 8 bits as one stream of `pack_bits`,
    others as they are.
    """
    bits = bits_of(spec)
    if bits >= BYTE:
        return codes.contiguous()
    flat = codes.reshape(-1).contiguous().view(torch.uint8)
    if codes.is_floating_point():
        return pack_bits(_looked_up(_numbers(format_named(spec.dtype)), flat), bits)
    return pack_bits(flat + _offset(codes.dtype, bits), bits)


def packed_shape(shape: torch.Size, spec: Spec) -> torch.Size:
    """Return the shape of what `pack` makes of codes."""
    bits = bits_of(spec)
    return shape if bits >= BYTE else torch.Size([-(-shape.numel() * bits // BYTE)])


def unpack(stored: Tensor, spec: Spec, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the codes of a tensor of `shape` that `pack` was given."""
    bits = bits_of(spec)
    if bits >= BYTE:
        return stored
    flat = unpack_bits(stored, bits, torch.Size(shape).numel())
    dtype = storage_dtype(spec)
    if dtype.is_floating_point:
        return (
            _looked_up(_patterns(format_named(spec.dtype)).view(torch.uint8), flat)
            .view(dtype)
            .view(shape)
        )
    return (flat - _offset(dtype, bits)).view(dtype).view(shape)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return rows of codes as streams of bits, the first code in the lowest bits of the first
    byte.

    Args:
        codes: uint8 [..., n], each below 2^bits: signed codes with 2^(bits - 1) added.
        bits: at most 8.

    Returns:
        uint8 [..., ceil(n * bits / 8)]. Filled up to words and read as int32 it is the order of
            compressed-tensors' `pack-quantized` format; of 4 bits also that of ONNX.

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist()
    [33, 3]
    """
    length = codes.shape[-1]
    return _regrouped(codes, bits, BYTE)[..., : -(-length * bits // BYTE)].contiguous()


def unpack_bits(stream: Tensor, bits: int, length: int) -> Tensor:
    """Return the `length` codes of each row that `pack_bits` was given.

    >>> unpack_bits(torch.tensor([33, 3], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    return _regrouped(stream, BYTE, bits)[..., :length].contiguous()


def _regrouped(numbers: Tensor, bits: int, into: int) -> Tensor:
    """Streams of `bits` bits a number along the last axis as numbers of `into` bits, filled up
    with zeros; uint8.
    """
    whole = math.lcm(bits, into)
    count, wide = whole // bits, {8: torch.uint8, 24: torch.int32}.get(whole, torch.int64)
    parts = pad(numbers, (0, -numbers.shape[-1] % count)).reshape(
        *numbers.shape[:-1], -1, count
    )
    word = parts[..., 0].to(wide)
    for k in range(1, count):
        word |= parts[..., k].to(wide) << bits * k
    mask = (1 << into) - 1
    return torch.stack(
        [(word >> into * k & mask).to(torch.uint8) for k in range(whole // into)], -1
    ).flatten(-2)


def code_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the smallest integer dtype that holds a range, but not uint16, in which torch can
    compute little.

    >>> code_dtype(-8, 7), code_dtype(0, 255), code_dtype(0, 65535)
    (torch.int8, torch.uint8, torch.int32)
    """
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        if info.min <= quant_min and quant_max <= info.max:
            return dtype
    return torch.int64


def work_dtype_of(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """Return what a quantizer of `spec` computes in, for a tensor of `dtype`."""
    wide = spec.dtype == "int" and work_dtype(spec.quant_min, spec.quant_max) == torch.float64
    return torch.float64 if wide or dtype == torch.float64 else torch.float32


def _factor(spec: Spec) -> float:
    """What values of a format are multiplied with to be stored; 0 for integers, which have a
    zero point instead.
    """
    return 0.0 if spec.dtype == "int" else format_named(spec.dtype).factor


def storage_dtype(spec: Spec) -> torch.dtype:
    """Return the dtype of codes that are not packed."""
    return (
        code_dtype(spec.quant_min, spec.quant_max)
        if spec.dtype == "int"
        else format_named(spec.dtype).storage
    )


def _offset(dtype: torch.dtype, bits: int) -> int:
    """What is added to a code for it not to be negative; bytes wrap around."""
    return 1 << (bits - 1) if dtype.is_signed else 0


def _looked_up(table: Tensor, numbers: Tensor) -> Tensor:
    """The entry of a table of bytes for each number, block by block, as indices take four times
    as much memory.
    """
    found = torch.empty_like(numbers)
    for part, target in zip(
        torch.split(numbers, BLOCK), torch.split(found, BLOCK), strict=True
    ):
        torch.index_select(table, 0, part.int(), out=target)
    return found


@cache
def _patterns(row: FloatFormat) -> Tensor:
    """The value of each code of a format with few bits, sign, exponent and mantissa from the
    highest bit, in `storage`.

    Those of fp4 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a minus.
    """
    assert row.mantissa is not None
    parts = [divmod(code, 1 << row.mantissa) for code in range(1 << (row.bits - 1))]
    finest = 2.0 ** (row.least - row.mantissa)
    magnitudes = [
        finest
        * (
            mantissa
            if not exponent
            else ((1 << row.mantissa) + mantissa) * 2.0 ** (exponent - 1)
        )
        for exponent, mantissa in parts
    ]
    return torch.tensor([*magnitudes, *(-value for value in magnitudes)]).to(row.storage)


@cache
def _numbers(row: FloatFormat) -> Tensor:
    """The inverse of `_patterns`: for each byte of `storage` the code of its value, uint8
    [256].
    """
    numbers = torch.zeros(256, dtype=torch.uint8)
    values = _patterns(row).view(torch.uint8)
    numbers[values.int()] = torch.arange(len(values), dtype=torch.uint8)
    return numbers
