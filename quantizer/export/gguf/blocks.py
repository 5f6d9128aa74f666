"""Stores a weight in the blocks of a GGUF file: scales as float16, codes as bytes.

Source: ggml's block_q4_0 to block_q8_0; tests compare with the package gguf. Other blocks are
in `super_blocks`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.exporter import Reason
from quantizer.export.gguf.super_blocks import packed_levels, packed_super_blocks
from quantizer.export.stored_weights import is_symmetric, scales_by_row
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import pack_bits
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams

GGUF_BLOCK = 32
"""How many consecutive inputs share a scale."""
_HALF_BITS = 11
"""The significant bits of a half."""
_HALF_EXPONENT = 24
"""Values of float16 are multiples of 2^-24."""
_LARGEST_HALF = 65504.0
_NIBBLE = 4
"""The bits of half a byte."""


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
    for kind in BLOCK_TYPES:
        if kind.has_minimum != is_symmetric(spec) and kind.bits >= spec.bit_width:
            return kind
    return None


def block_refusal(spec: QuantizationSpec, inputs: int) -> Reason | None:
    """Return why the weight of a layer with `inputs` inputs cannot be stored in blocks; None if
    it can.
    """
    if inputs % GGUF_BLOCK:
        return (
            f"has {inputs} inputs, and blocks {GGUF_BLOCK} each",
            "exclude the layer, which keeps it in float",
        )
    if spec.dtype in _TYPES_OF_FORMATS:
        if spec.ch_axis == 1:
            return None
        return "has groups of outputs", "set its ch_axis to 1"
    if spec.dtype != "int":
        return (
            f"is {spec.dtype}, which blocks do not hold",
            "use int4, int5, int8, q4_k, q5_k, q6_k or iq4_nl (`quantizer init "
            "--strategy gguf_q8_0`)",
        )
    if block_type(spec) is None and is_symmetric(spec):
        return (
            f"has {spec.bit_width} bits, and blocks 4, 5 or 8",
            "set its width to 8 bits or less",
        )
    if block_type(spec) is None:
        return (
            f"has {spec.bit_width} bits and a zero point, and blocks with a minimum 4 or 5",
            "set its symmetric to true, or its dtype to uint4 or uint5 (`quantizer init "
            "--strategy gguf_q4_1`)",
        )
    if spec.qscheme == "per_channel" and spec.ch_axis != 0:
        return "has a scale for each input", "set its ch_axis to 0"
    if spec.qscheme != "per_group":
        return None
    if spec.ch_axis != 1:
        return "has groups of outputs", "set its ch_axis to 1"
    group_size = spec.group_size or -1
    if group_size > 0 and group_size % GGUF_BLOCK:
        return (
            f"has groups of {group_size}, and blocks {GGUF_BLOCK} inputs",
            f"set its group_size to {GGUF_BLOCK}",
        )
    return None


def with_float16_scale(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the tensor with a scale that is a half.

    With a zero point, scale * zero_point is a half as well, so that the block's minimum is
    exact. Codes are rounded again for the new scale. They change only if it differs much from
    the old one.

    Raises:
        ValueError: the tensor has no codes.
    """
    spec, codes = tensor.spec, tensor.codes
    if codes is None:
        raise ValueError("Only a weight that was encoded can be stored in blocks.")
    if spec.scale_type == "superblock":
        return tensor
    if spec.dtype in _TYPES_OF_FORMATS:
        half_scale = short_scale(tensor.scale, tensor.zero_point)
        return replace(tensor, scale=half_scale)
    scale = short_scale(tensor.scale, tensor.zero_point)
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
        ValueError: the weight has no codes, or no type can hold them.
    """
    if tensor.spec.scale_type == "superblock":
        return packed_super_blocks(tensor)
    if tensor.spec.dtype in _TYPES_OF_FORMATS:
        return packed_levels(tensor)
    kind = block_type(tensor.spec)
    if tensor.codes is None or kind is None:
        raise ValueError("Only a weight that was encoded in integers can be stored in blocks.")
    codes = tensor.codes.view(len(tensor.codes), -1, GGUF_BLOCK)
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
    low, high = torch.split(unsigned & 15, GGUF_BLOCK // 2, -1)
    parts.append(low | high << _NIBBLE)
    return torch.cat(parts, -1).flatten(1)


def _by_block(values: Tensor, codes: Tensor) -> Tensor:
    """Return scales or zero points as [outputs, blocks, 1]."""
    rows = scales_by_row(values, codes)
    repeats = codes.shape[1] // rows.shape[1]
    return rows.repeat_interleave(repeats, 1)[..., None]


def _half_bytes(values: Tensor) -> Tensor:
    """Return values as float16, little endian."""
    return values.half().view(torch.uint8)
