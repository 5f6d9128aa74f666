"""Stores codes, scales and minima in the blocks of Q4_K, Q5_K, Q6_K and IQ4_NL.

Source: ggml's block_q4_K to block_iq4_nl; tests compare with the package gguf.
"""

import torch
from torch import Tensor

from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import pack_bits
from quantizer.numerics.formats import format_named
from quantizer.numerics.superblocks import (
    SUPERBLOCK,
    SUPERBLOCKS,
    ScaleCodes,
    split_superblocks,
)

_NIBBLE = 4
_LOW = 15
_HALF_BLOCK = 16
_RUN = 32
"""Consecutive values whose codes have the same bits of consecutive bytes."""


def packed_super_blocks(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of a weight in super-blocks as bytes, uint8 [outputs, bytes].

    Raises:
        ValueError: the weight has no codes, or scales that super-blocks cannot store.
    """
    codes = tensor.codes
    if codes is None:
        raise ValueError("Only a weight that was encoded can be stored in blocks.")
    by_block = codes.reshape(-1, SUPERBLOCK)
    layout = SUPERBLOCKS[tensor.spec.dtype]
    scales, factor = _split(tensor.scale, layout.scales, layout.groups)
    if layout.minima is None:
        parts = _with_signed_scales(by_block, scales, factor)
    else:
        minima, minimum_factor = _split(tensor.zero_point, layout.minima, layout.groups)
        factors = _half_bytes(torch.cat([factor, minimum_factor], 1))
        parts = [factors, _six_bits(scales.to(torch.uint8), minima.to(torch.uint8))]
        parts += _with_minimum(by_block.view(torch.uint8), format_named(tensor.spec.dtype).bits)
    return torch.cat(parts, 1).reshape(len(codes), -1)


def _split(numbers: Tensor, codes: ScaleCodes, groups: int) -> tuple[Tensor, Tensor]:
    """Return the codes and factors of scales.

    Raises:
        ValueError: no codes give the scales back.
    """
    stored, factor = split_superblocks(numbers, codes, groups)
    if not torch.equal((stored * factor).float(), numbers.reshape(stored.shape)):
        raise ValueError("The scales are not multiples of a float16 of their super-block.")
    return stored, factor


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Return 8 scales and 8 minima of 6 bits as 12 bytes. The last four of each are divided
    over two bytes.
    """
    first_scales, last_scales = torch.split(scales, 4, 1)
    first_minima, last_minima = torch.split(minima, 4, 1)
    return torch.cat(
        [
            first_scales | last_scales >> 4 << 6,
            first_minima | last_minima >> 4 << 6,
            last_scales & _LOW | (last_minima & _LOW) << _NIBBLE,
        ],
        1,
    )


def _with_minimum(codes: Tensor, bits: int) -> list[Tensor]:
    """Return the bytes of codes from 0 on: the fifth bits of 5-bit codes, and the other four.

    The bits of a byte are of the codes at one place in all runs; a byte of the other four bits
    has those of two runs.
    """
    runs = codes.view(len(codes), -1, _RUN)
    parts = []
    if bits > _NIBBLE:
        high = torch.zeros_like(runs[:, 0])
        for number, run in enumerate((runs >> _NIBBLE).unbind(1)):
            high |= run << number
        parts.append(high)
    low = runs & _LOW
    parts.append((low[:, 0::2] | low[:, 1::2] << _NIBBLE).flatten(1))
    return parts


def _with_signed_scales(codes: Tensor, scales: Tensor, factor: Tensor) -> list[Tensor]:
    """Return the bytes of 6-bit codes, of their scales and of the factor.

    Each half of a super-block has four runs.
    """
    unsigned = (codes + 32).view(torch.uint8)
    first, second, third, fourth = unsigned.view(-1, 2, 4, _RUN).unbind(2)
    low = torch.cat(
        [first & _LOW | (third & _LOW) << _NIBBLE, second & _LOW | (fourth & _LOW) << _NIBBLE],
        2,
    )
    high = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
    scale_bytes = scales.to(torch.int8).view(torch.uint8)
    return [low.flatten(1), high.flatten(1), scale_bytes, _half_bytes(factor)]


def packed_levels(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of a weight in blocks with a float16 and numbers of levels as bytes,
    uint8 [outputs, bytes].

    Raises:
        ValueError: the weight has no codes.
    """
    codes = tensor.codes
    if codes is None:
        raise ValueError("Only a weight that was encoded can be stored in blocks.")
    levels = torch.tensor(format_named(tensor.spec.dtype).levels).to(codes.dtype)
    numbers = torch.bucketize(codes, levels, out_int32=True).to(torch.uint8)
    by_block = numbers.reshape(-1, _RUN)
    low, high = torch.split(by_block, _HALF_BLOCK, 1)
    pairs = torch.stack([low, high], -1)
    parts = [_half_bytes(tensor.scale.reshape(-1, 1)), pack_bits(pairs, _NIBBLE).flatten(1)]
    return torch.cat(parts, 1).reshape(len(codes), -1)


def _half_bytes(values: Tensor) -> Tensor:
    """Return rows of values as float16, little endian."""
    return values.half().view(torch.uint8)
