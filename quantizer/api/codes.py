"""A quantized parameter as its codes, and back, bit for bit. Reads no files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.fake_quantize import code_dtype
from quantizer.numerics.granularity import from_rows, to_rows

FACTORS = {"mx_int8": 64.0, "bfp16": 1.0}
"""Integer codes per unit of the elements of block formats."""

STORAGE = {
    **dict.fromkeys(("fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4"), torch.float8_e4m3fn),
    **dict.fromkeys(FACTORS, torch.int8),
    "fp8_e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What holds each value of a floating-point format; float8_e4m3fn has all values of the smaller ones."""

NIBBLE = 4


def encode(value: Tensor, quantizer: TensorQuantizer) -> tuple[Tensor, bool]:
    """(what to store, whether it is codes): the values themselves where codes would not give them back exactly.

    Integers of up to 4 bits are packed two in a byte, the first in the low half, counted from quant_min.
    """
    spec = quantizer.spec
    stored = _packed(_codes(value, quantizer), spec)
    exact = torch.equal(decode(stored, quantizer, value.shape, value.dtype), value)
    return (stored, True) if exact else (value.contiguous(), False)


def decode(stored: Tensor, quantizer: TensorQuantizer, shape: torch.Size | list[int], dtype: torch.dtype) -> Tensor:
    """The parameter that `encode` was given."""
    spec = quantizer.spec
    codes = _unpacked(stored, spec, shape)
    if not spec.is_scaled:
        return codes.to(dtype)
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    work = _work(spec, dtype)
    scale, zero_point = _per_row(quantizer)
    rows = to_rows(codes.to(work), *cut)
    rows = rows - zero_point if spec.dtype == "int" else rows / FACTORS.get(spec.dtype, 1.0)
    return from_rows(rows * scale.to(work), tuple(shape), *cut).to(dtype).contiguous()


def _codes(value: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Codes in the parameter's shape; it is on its grid, so that rounding only undoes the last bits."""
    spec = quantizer.spec
    if not spec.is_scaled:
        return value.to(STORAGE[spec.dtype])
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    scale, zero_point = _per_row(quantizer)
    rows = to_rows(value.double(), *cut) / scale.double()
    if spec.dtype == "int":
        rows = (rows.round() + zero_point).clamp(spec.quant_min, spec.quant_max)
        return from_rows(rows, tuple(value.shape), *cut).to(code_dtype(spec.quant_min, spec.quant_max))
    rows = rows * FACTORS.get(spec.dtype, 1.0)
    rows = rows.round() if spec.dtype in FACTORS else rows.float()
    return from_rows(rows, tuple(value.shape), *cut).to(STORAGE[spec.dtype]).contiguous()


def _per_row(quantizer: TensorQuantizer) -> tuple[Tensor, Tensor]:
    """Scale and zero point as columns, one for each row of `to_rows`."""
    assert quantizer.scale is not None and quantizer.zero_point is not None  # parameters' scales are static
    return quantizer.scale.reshape(-1, 1), quantizer.zero_point.reshape(-1, 1)


def _work(spec: QuantizationSpec, dtype: torch.dtype) -> torch.dtype:
    """What a quantizer computes in."""
    wide = spec.dtype == "int" and spec.quant_max - spec.quant_min >= 1 << 24
    return torch.float64 if wide or dtype == torch.float64 else torch.float32


def _is_packed(spec: QuantizationSpec) -> bool:
    return spec.dtype == "int" and spec.bit_width <= NIBBLE


def _packed(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    if not _is_packed(spec):
        return codes.contiguous()
    flat = (codes.reshape(-1).to(torch.int16) - spec.quant_min).to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2))
    return flat[::2] | flat[1::2] << NIBBLE


def _unpacked(stored: Tensor, spec: QuantizationSpec, shape: Any) -> Tensor:
    if not _is_packed(spec):
        return stored
    flat = torch.stack([stored & 15, stored >> NIBBLE], dim=1).reshape(-1).to(torch.int16) + spec.quant_min
    return flat[: torch.Size(shape).numel()].reshape(shape)
