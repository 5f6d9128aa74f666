"""Convert quantized tensors to codes and back, bit for bit, and pack codes of a few bits.

A code is what a format stores of a value before scaling: an integer, or the value itself in the
format's `storage` dtype.
"""

import math
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantizer.numerics.blocks import BLOCK_SIZE, Kernel, blocks, workspace
from quantizer.numerics.fake_quantize import FloatKernel, IntegerKernel, work_dtype
from quantizer.numerics.formats import format_named, has_minimum, storage_of
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.rows import NumberFormat

_BYTE = 8
_WORD_DTYPES = {8: torch.uint8, 24: torch.int32}


class Spec(Protocol):
    """The fields of a `QuantizationSpec` that the codec reads. This room does not import
    configs.
    """

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
    """Return the codes that `decode` turns into `value`, in its shape, or None if no codes give
    it back exactly.

    Args:
        value: floating point, the output of a quantizer of `spec`: rounding it again only
            undoes the last bits.
        spec: its format and granularity.
        scale: float32, of `granularity.scale_shape`. Formats without a scale read neither this
            nor the zero point.
        zero_point: int32, same shape. Formats with a minimum have it here, as float32.
    """
    storage = storage_dtype(spec)
    if not spec.is_scaled:
        codes = value.to(storage)
        return codes if torch.equal(codes.to(value.dtype), value) else None
    if has_minimum(spec.dtype):
        return _encode_with_minimum(value, spec, scale, zero_point)
    factor = _factor(spec)
    kernel: Kernel
    if factor:
        kernel = FloatKernel.of(spec.dtype)
    else:
        kernel = IntegerKernel.of(spec.quant_min, spec.quant_max, "half_even")
    rows = workspace(to_rows(value, spec.cut), work_dtype_of(spec, value.dtype))
    codes = torch.empty_like(rows, dtype=storage)
    row_blocks = blocks(rows, codes, scale.reshape(-1), zero_point.reshape(-1), ch_axis=0)
    for x, part, step, zero in row_blocks:
        round_ = kernel.rounder(zero)
        rounded = round_(x / step)
        stored = rounded.mul_(factor) if factor else rounded.add_(zero)
        part.copy_(stored)
        restored = _unscaled(part.to(x.dtype), factor, zero).mul_(step)
        if not torch.equal(restored.to(value.dtype), x.to(value.dtype)):
            return None
    return from_rows(codes, tuple(value.shape), spec.cut).contiguous()


def _encode_with_minimum(
    value: Tensor, spec: Spec, scale: Tensor, minimum: Tensor
) -> Tensor | None:
    # Only groups with a minimum need it
    from quantizer.numerics.superblocks import encode_with_minimum

    rows = to_rows(value, spec.cut)
    codes = encode_with_minimum(rows, scale, minimum, spec.dtype)
    if codes is None:
        return None
    return from_rows(codes, tuple(value.shape), spec.cut).contiguous()


def decode(
    codes: Tensor,
    spec: Spec,
    scale: Tensor,
    zero_point: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values of codes in `dtype`, as a quantizer of `spec` computes them. The other
    arguments are as for `encode`.
    """
    if not spec.is_scaled:
        return codes.to(dtype)
    work = work_dtype_of(spec, dtype)
    if has_minimum(spec.dtype):
        # Only groups with a minimum need it
        from quantizer.numerics.superblocks import decode_with_minimum

        rows = decode_with_minimum(to_rows(codes, spec.cut), scale, zero_point)
        return from_rows(rows, tuple(codes.shape), spec.cut).to(dtype).contiguous()
    rows = to_rows(codes.to(work), spec.cut)
    rows = _unscaled(rows, _factor(spec), zero_point.reshape(-1, 1))
    rows.mul_(scale.reshape(-1, 1).to(work))
    return from_rows(rows, tuple(codes.shape), spec.cut).to(dtype).contiguous()


def _unscaled(codes: Tensor, factor: float, zero_point: int | Tensor) -> Tensor:
    """Replace floating-point `codes` by value / scale, and return them."""
    return codes.div_(factor) if factor else codes.sub_(zero_point)


def bits_of(spec: Spec) -> int:
    """Return the bits of one code.

    Raises:
        ValueError: there is no such format.
    """
    return spec.bit_width if spec.dtype == "int" else format_named(spec.dtype).bits


def pack(codes: Tensor, spec: Spec) -> Tensor:
    """Return codes as files store them. Codes of fewer than 8 bits become one stream of
    `pack_bits`.
    """
    bits = bits_of(spec)
    if bits >= _BYTE:
        return codes.contiguous()
    flat = codes.reshape(-1).contiguous().view(torch.uint8)
    if _has_patterns(spec):
        return pack_bits(_looked_up(_numbers(format_named(spec.dtype)), flat), bits)
    return pack_bits(flat + _offset(codes.dtype, bits), bits)


def packed_shape(shape: torch.Size, spec: Spec) -> torch.Size:
    """Return the shape that `pack` gives codes of `shape`."""
    bits = bits_of(spec)
    if bits >= _BYTE:
        return shape
    return torch.Size([-(-shape.numel() * bits // _BYTE)])


def unpack(stored: Tensor, spec: Spec, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the codes of a tensor of `shape` that `pack` stored."""
    bits = bits_of(spec)
    if bits >= _BYTE:
        return stored
    flat = unpack_bits(stored, bits, torch.Size(shape).numel())
    dtype = storage_dtype(spec)
    if _has_patterns(spec):
        patterns = _patterns(format_named(spec.dtype)).view(torch.uint8)
        return _looked_up(patterns, flat).view(dtype).view(shape)
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
    stored_bytes = -(-codes.shape[-1] * bits // _BYTE)
    return _regrouped(codes, bits, _BYTE)[..., :stored_bytes].contiguous()


def unpack_bits(stream: Tensor, bits: int, length: int) -> Tensor:
    """Return the `length` codes of each row that `pack_bits` stored.

    >>> unpack_bits(torch.tensor([33, 3], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    return _regrouped(stream, _BYTE, bits)[..., :length].contiguous()


def _regrouped(numbers: Tensor, bits: int, new_bits: int) -> Tensor:
    """Return streams of numbers of `bits` bits along the last axis as numbers of `new_bits`
    bits, filled up with zeros; uint8.
    """
    # The shortest word that holds whole numbers of both widths
    word_bits = math.lcm(bits, new_bits)
    word_dtype = _WORD_DTYPES.get(word_bits, torch.int64)
    per_word = word_bits // bits
    padded = pad(numbers, (0, -numbers.shape[-1] % per_word))
    parts = padded.reshape(*numbers.shape[:-1], -1, per_word)
    word = parts[..., 0].to(word_dtype)
    for index in range(1, per_word):
        word |= parts[..., index].to(word_dtype) << bits * index
    mask = (1 << new_bits) - 1
    new_numbers = []
    for shift in range(0, word_bits, new_bits):
        new_numbers.append((word >> shift & mask).to(torch.uint8))
    return torch.stack(new_numbers, -1).flatten(-2)


def code_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the smallest integer dtype that holds a range. It is never uint16, in which torch
    can compute little.

    >>> code_dtype(-8, 7), code_dtype(0, 255), code_dtype(0, 65535)
    (torch.int8, torch.uint8, torch.int32)
    """
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        if info.min <= quant_min and quant_max <= info.max:
            return dtype
    return torch.int64


def work_dtype_of(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a quantizer of `spec` computes in, for a tensor of `dtype`."""
    if dtype == torch.float64 or spec.dtype != "int":
        return torch.promote_types(dtype, torch.float32)
    return work_dtype(spec.quant_min, spec.quant_max)


def storage_dtype(spec: Spec) -> torch.dtype:
    """Return the dtype of codes of `spec`."""
    if spec.dtype == "int":
        return code_dtype(spec.quant_min, spec.quant_max)
    return storage_of(format_named(spec.dtype))


def _factor(spec: Spec) -> float:
    """Return what values of a format are multiplied with to be stored. It is 0 for integers,
    which have a zero point instead.
    """
    return 0.0 if spec.dtype == "int" else format_named(spec.dtype).factor


def _has_patterns(spec: Spec) -> bool:
    """Return whether codes are numbered by a table of the format."""
    if spec.dtype == "int":
        return False
    row = format_named(spec.dtype)
    return bool(row.levels) or storage_of(row).is_floating_point


def _offset(dtype: torch.dtype, bits: int) -> int:
    """Return what makes signed codes of `bits` bits non-negative when added; bytes wrap
    around.
    """
    return 1 << (bits - 1) if dtype.is_signed else 0


def _looked_up(table: Tensor, numbers: Tensor) -> Tensor:
    """Return the entry of a table of bytes for each number. It goes block by block, as indices
    take four times as much memory.
    """
    entries = torch.empty_like(numbers)
    parts = zip(torch.split(numbers, BLOCK_SIZE), torch.split(entries, BLOCK_SIZE), strict=True)
    for part, target in parts:
        torch.index_select(table, 0, part.int(), out=target)
    return entries


@cache
def _patterns(row: NumberFormat) -> Tensor:
    """Return the value of each code of a format with few bits, in its `storage` dtype.

    A code is sign, exponent and mantissa, from the highest bit on. The values of fp4 are 0,
    0.5, 1, 1.5, 2, 3, 4, 6, and the same with a minus.
    """
    if row.levels:
        return torch.tensor(row.levels).to(storage_of(row))
    assert row.mantissa is not None
    finest = 2.0 ** (row.least - row.mantissa)
    magnitudes = []
    for code in range(1 << (row.bits - 1)):
        exponent, mantissa = divmod(code, 1 << row.mantissa)
        if exponent:
            mantissa = ((1 << row.mantissa) + mantissa) << (exponent - 1)
        magnitudes.append(finest * mantissa)
    negative = [-magnitude for magnitude in magnitudes]
    return torch.tensor(magnitudes + negative).to(storage_of(row))


@cache
def _numbers(row: NumberFormat) -> Tensor:
    """Return the inverse of `_patterns`: for each byte of `storage` the code of its value,
    uint8 [256].
    """
    numbers = torch.zeros(256, dtype=torch.uint8)
    values = _patterns(row).view(torch.uint8)
    numbers[values.int()] = torch.arange(len(values), dtype=torch.uint8)
    return numbers
