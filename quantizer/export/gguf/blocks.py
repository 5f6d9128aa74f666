"""Stores a weight in the blocks of a GGUF file: scales as float16, codes as bytes.

Source: ggml's block_q4_0 to block_q8_0 and block_q4_K to block_iq4_nl; tests compare with the
package gguf.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.exporter import Reason
from quantizer.export.limits import (
    GROUPS_OF_INPUTS,
    SCALES_OF_OUTPUTS,
    Limit,
    beyond,
    is_symmetric,
)
from quantizer.export.transformers_models import scales_by_row
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.codes import pack_bits
from quantizer.numerics.formats import format_named
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.numerics.superblocks import (
    SUPERBLOCK,
    SUPERBLOCKS,
    ScaleCodes,
    split_superblocks,
)

GGUF_BLOCK = 32
"""How many consecutive inputs share a scale."""
_HALF_BITS = 11
"""The significant bits of a half."""
_HALF_EXPONENT = 24
"""Values of float16 are multiples of 2^-24."""
_LARGEST_HALF = 65504.0
_NIBBLE = 4
"""The bits of half a byte."""
_LOW = 15
"""Those of the low half."""


@dataclass(frozen=True)
class BlockType:
    """A type of blocks by its name in ggml, with codes of `bits` bits.

    A value is code * scale, or code * scale + minimum if it `has_minimum`.
    """

    name: str
    bits: int
    has_minimum: bool


BLOCK_TYPES = (
    BlockType("Q4_0", 4, has_minimum=False),
    BlockType("Q5_0", 5, has_minimum=False),
    BlockType("Q8_0", 8, has_minimum=False),
    BlockType("Q4_1", 4, has_minimum=True),
    BlockType("Q5_1", 5, has_minimum=True),
)


_TYPES_OF_FORMATS = {
    "q4_k": BlockType("Q4_K", 4, has_minimum=True),
    "q5_k": BlockType("Q5_K", 5, has_minimum=True),
    "q6_k": BlockType("Q6_K", 6, has_minimum=False),
    "iq4_nl": BlockType("IQ4_NL", 4, has_minimum=False),
}
"""The types whose formats no integers stand for."""


def block_type(spec: QuantizationSpec) -> BlockType | None:
    """Return the type with the fewest bits that can hold the codes of a spec; None if there is
    none.

    >>> block_type(QuantizationSpec(bit_width=3)).name
    'Q4_0'
    >>> block_type(QuantizationSpec(bit_width=5, symmetric=False)).name
    'Q5_1'
    """
    if spec.dtype != "int":
        return _TYPES_OF_FORMATS.get(spec.dtype)
    kinds = [kind for kind in BLOCK_TYPES if kind.has_minimum != is_symmetric(spec)]
    return next((kind for kind in kinds if kind.bits >= spec.bit_width), None)


def block_refusal(spec: QuantizationSpec, inputs: int) -> Reason | None:
    """Return why the weight of a layer with `inputs` inputs cannot be stored in blocks; None if
    it can.
    """
    if inputs % GGUF_BLOCK:
        return (
            f"has {inputs} inputs, and blocks {GGUF_BLOCK} each",
            "exclude the layer, which keeps it in float",
        )
    return beyond(_LIMITS, spec)


_LIMITS = (
    Limit(
        lambda spec: spec.dtype in ("int", *_TYPES_OF_FORMATS),
        "is {spec.dtype}, which blocks do not hold",
        "use int4, int5, int8, q4_k, q5_k, q6_k or iq4_nl (`quantizer init --preset "
        "gguf_q8_0`)",
    ),
    Limit(
        lambda spec: block_type(spec) is not None or not is_symmetric(spec),
        "has {spec.bit_width} bits, and blocks 4, 5 or 8",
        "set its width to 8 bits or less",
    ),
    Limit(
        lambda spec: block_type(spec) is not None,
        "has {spec.bit_width} bits and a zero point, and blocks with a minimum 4 or 5",
        "set its symmetric to true, or its dtype to uint4 or uint5 (`quantizer init --preset "
        "gguf_q4_1`)",
    ),
    SCALES_OF_OUTPUTS,
    GROUPS_OF_INPUTS,
    Limit(
        lambda spec: spec.dtype != "int" or not _has_other_groups(spec),
        "has groups of {spec.group_size}, and blocks " + f"{GGUF_BLOCK} inputs",
        f"set its group_size to {GGUF_BLOCK}",
    ),
)


def _has_other_groups(spec: QuantizationSpec) -> bool:
    """Return whether groups are not whole blocks."""
    size = spec.group_size or -1
    return spec.qscheme == "per_group" and size > 0 and size % GGUF_BLOCK != 0


def with_float16_scale(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the tensor with a scale that is a half.

    With a zero point, scale * zero_point is a half as well, so that the block's minimum is
    exact. Codes are rounded again for the new scale. They change only if it differs much from
    the old one.

    Raises:
        ValueError: the tensor has no codes.
    """
    spec, codes = tensor.spec, _codes_of(tensor)
    if spec.scale_type == "superblock":
        return tensor
    scale = short_scale(tensor.scale, tensor.zero_point)
    if spec.dtype != "int":
        return replace(tensor, scale=scale)
    if torch.equal(scale, tensor.scale):
        return tensor
    ratio = (tensor.scale / scale).reshape(-1, 1)
    zero_point = tensor.zero_point.reshape(-1, 1)
    rows = to_rows(codes.float(), spec.cut)
    rows = rows.sub(zero_point).mul_(ratio).round_().add_(zero_point)
    rows = rows.clamp_(spec.quant_min, spec.quant_max)
    rescaled = from_rows(rows, tuple(codes.shape), spec.cut)
    stored = tensor.with_qparams(QParams(scale, tensor.zero_point))
    return replace(stored, codes=rescaled.to(codes.dtype).contiguous())


def short_scale(scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the nearest float16 scales whose products with the zero point are float16,
    too.

    The zero point, 0 to 31, is an odd number times a power of two. If the odd number has n
    bits, the scale may have 11 - n significant bits, so that the product has at most 11.

    >>> short_scale(torch.tensor([0.1, 1e-9, 1e9]), torch.tensor(0)).tolist() == [
    ...     0.0999755859375,
    ...     2.0**-24,
    ...     65504.0,
    ... ]
    True
    >>> 1024 * float(short_scale(torch.tensor(0.1), torch.tensor(13)))  # 0.1 in 7 bits
    102.0
    """
    # x & -x is the largest power of two that divides x
    odd = zero_point // (zero_point & -zero_point).clamp(min=1)
    bits = _HALF_BITS - torch.where(odd > 1, torch.frexp(odd.float()).exponent, 0)
    magnitude = scale.abs()
    exponent = (torch.frexp(magnitude).exponent - bits).clamp(min=-_HALF_EXPONENT)
    step = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), exponent)
    zero_point_exponent = torch.frexp(zero_point.float()).exponent
    largest = _LARGEST_HALF / torch.ldexp(torch.ones_like(step), zero_point_exponent)
    rounded = torch.round(magnitude / step).mul_(step)
    rounded = rounded.clamp_(min=2.0**-_HALF_EXPONENT).minimum(largest)
    return rounded.float().copysign(scale)


def packed_blocks(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of a weight as blocks, uint8 [outputs, bytes].

    A block has the scale, the minimum if there is one, then the fifth bits of 5-bit codes, and
    the other four bits. A byte has those of code j in its low half, and those of code j + 16 in
    its high half. 8-bit codes are bytes of their own.

    Raises:
        ValueError: the weight has no codes.
    """
    if tensor.spec.scale_type == "superblock":
        return packed_super_blocks(tensor)
    if tensor.spec.dtype != "int":
        return packed_levels(tensor)
    codes = _codes_of(tensor)
    codes = codes.view(len(codes), -1, GGUF_BLOCK)
    kind = block_type(tensor.spec)
    # The target refuses other weights
    assert kind is not None
    scale = _by_block(tensor.scale, codes)
    parts = [_half_bytes(scale)]
    if kind.has_minimum:
        parts.append(_half_bytes(-scale * _by_block(tensor.zero_point, codes)))
    if kind.bits == 8:
        return torch.cat([*parts, codes.view(torch.uint8)], -1).flatten(1)
    # Symmetric codes are stored with an offset that makes them unsigned
    offset = 0 if kind.has_minimum else 1 << (kind.bits - 1)
    unsigned = (codes.int() + offset).to(torch.uint8)
    if kind.bits > _NIBBLE:
        parts.append(pack_bits(unsigned >> _NIBBLE, 1))
    low, high = torch.split(unsigned & _LOW, GGUF_BLOCK // 2, -1)
    parts.append(low | high << _NIBBLE)
    return torch.cat(parts, -1).flatten(1)


def _codes_of(tensor: QuantizedTensor) -> Tensor:
    if tensor.codes is None:
        raise ValueError("Only a weight that was encoded can be stored in blocks.")
    return tensor.codes


def _by_block(values: Tensor, codes: Tensor) -> Tensor:
    """Return scales or zero points as [outputs, blocks, 1]."""
    rows = scales_by_row(values, codes)
    repeats = codes.shape[1] // rows.shape[1]
    return rows.repeat_interleave(repeats, 1)[..., None]


def _half_bytes(values: Tensor) -> Tensor:
    """Return values as float16, little endian."""
    return values.half().view(torch.uint8)


def packed_super_blocks(tensor: QuantizedTensor) -> Tensor:
    """Return the bytes of a weight in super-blocks, a row for each of its rows.

    Raises:
        ValueError: it has scales that super-blocks cannot store.
    """
    codes = _codes_of(tensor)
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
    runs = codes.view(len(codes), -1, GGUF_BLOCK)
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
    first, second, third, fourth = unsigned.view(-1, 2, 4, GGUF_BLOCK).unbind(2)
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
    """
    codes = _codes_of(tensor)
    levels = torch.tensor(format_named(tensor.spec.dtype).levels).to(codes.dtype)
    numbers = torch.bucketize(codes, levels, out_int32=True).to(torch.uint8)
    by_block = numbers.reshape(-1, GGUF_BLOCK)
    low, high = torch.split(by_block, GGUF_BLOCK // 2, 1)
    pairs = torch.stack([low, high], -1)
    parts = [_half_bytes(tensor.scale.reshape(-1, 1)), pack_bits(pairs, _NIBBLE).flatten(1)]
    return torch.cat(parts, 1).reshape(len(codes), -1)
