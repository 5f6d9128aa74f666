"""The blocks of a GGUF file: which type holds a weight, scales that are halfs, codes as bytes.
Knows no network.

Source: ggml's block_q4_0 to block_q8_0, measured against the package gguf.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.compressed_tensors.schemes import Reason, by_row, is_symmetric
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import pack_bits
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams

BLOCK = 32
"""Consecutive inputs that have one scale."""
SIGNIFICANT = 11
"""Bits of a half's mantissa."""
SMALLEST, LARGEST = 24, 65504.0
"""Halfs are multiples of 2^-24, and at most so large."""
NIBBLE, BYTE = 4, 8


@dataclass(frozen=True)
class BlockType:
    """A type of blocks by its name in ggml: codes of so many bits; value = code * scale, or + a
    minimum.
    """

    name: str
    bits: int
    has_minimum: bool


TYPES = (
    BlockType("Q4_0", 4, has_minimum=False),
    BlockType("Q5_0", 5, has_minimum=False),
    BlockType("Q8_0", 8, has_minimum=False),
    BlockType("Q4_1", 4, has_minimum=True),
    BlockType("Q5_1", 5, has_minimum=True),
)


def block_type(spec: QuantizationSpec) -> BlockType | None:
    """The smallest type that holds these codes; None where none does.

    >>> (
    ...     block_type(QuantizationSpec(bit_width=3)).name,
    ...     block_type(QuantizationSpec(bit_width=5, symmetric=False)).name,
    ... )
    ('Q4_0', 'Q5_1')
    """
    fitting = (
        row
        for row in TYPES
        if row.has_minimum != is_symmetric(spec) and row.bits >= spec.bit_width
    )
    return next(fitting, None) if spec.dtype == "int" else None


def weight_refusal(spec: QuantizationSpec, inputs: int) -> Reason | None:
    """Why the weight of a layer with so many inputs cannot be blocks; None if it can."""
    last, first = spec.ch_axis in (1, -1), spec.ch_axis in (0, -2)
    if inputs % BLOCK:
        return (
            f"has {inputs} inputs, and blocks {BLOCK} each",
            "exclude the layer, which keeps it in float",
        )
    if spec.dtype != "int":
        return (
            f"is {spec.dtype}, which blocks do not hold",
            "use int4, int5 or int8 (quantizer init --strategy gguf_q8_0)",
        )
    if block_type(spec) is None:
        if is_symmetric(spec):
            return (
                f"has {spec.bit_width} bits, and blocks 4, 5 or 8",
                "set its width to 8 bits or less",
            )
        why = f"has {spec.bit_width} bits and a zero point, and blocks with a minimum 4 or 5"
        return (
            why,
            "set its symmetric to true, or its dtype to uint4 or uint5 (quantizer init "
            "--strategy gguf_q4_1)",
        )
    if spec.qscheme == "per_channel" and not first:
        return "has a scale for each input", "set its ch_axis to 0"
    if spec.qscheme == "per_group" and not last:
        return "has groups of outputs", "set its ch_axis to 1"
    if (
        spec.qscheme == "per_group"
        and (spec.group_size or -1) > 0
        and (spec.group_size or 0) % BLOCK
    ):
        return (
            f"has groups of {spec.group_size}, and blocks {BLOCK} inputs",
            f"set its group_size to {BLOCK}",
        )
    return None


def halved(tensor: QuantizedTensor) -> QuantizedTensor:
    """The tensor with a scale that blocks hold: a half, and where there is a zero point, scale
    * zero_point is one.

    So a block's minimum is exactly that of the codes. The codes stay, but those of scales that
    no half is near.

    Raises:
        ValueError: it has no codes.
    """
    spec, codes = tensor.spec, tensor.codes
    if codes is None:
        raise ValueError("Only a weight that was encoded can be stored in blocks.")
    scale = short_scale(tensor.scale, tensor.zero_point)
    if torch.equal(scale, tensor.scale):
        return tensor
    cut = spec.qscheme, spec.ch_axis, spec.group_size, 1
    ratio, zero_point = (tensor.scale / scale).reshape(-1, 1), tensor.zero_point.reshape(-1, 1)
    rows = to_rows(codes.float(), cut).sub(zero_point).mul_(ratio).round_().add_(zero_point)
    moved = from_rows(rows.clamp_(spec.quant_min, spec.quant_max), tuple(codes.shape), cut)
    return replace(
        tensor.at(QParams(scale, tensor.zero_point)), codes=moved.to(codes.dtype).contiguous()
    )


def short_scale(scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the nearest scales that are halfs, and are halfs times the zero point, too, which
    is 0 to 31.

    Of a half's 11 significant bits, the zero point needs as many as its odd factor has, the
    scale may have the others.

    >>> short_scale(torch.tensor([0.1, 1e-9, 1e9]), torch.tensor(0)).tolist() == [
    ...     0.0999755859375,
    ...     2.0**-24,
    ...     65504.0,
    ... ]
    True
    >>> 1024 * float(short_scale(torch.tensor(0.1), torch.tensor(13)))  # 0.1 in 7 bits
    102.0
    """
    odd = zero_point // (zero_point & -zero_point).clamp(min=1)
    bits = SIGNIFICANT - torch.where(odd > 1, torch.frexp(odd.float()).exponent, 0)
    exponent = (torch.frexp(scale).exponent - bits).clamp(min=-SMALLEST)
    step = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), exponent)
    largest = LARGEST / torch.ldexp(
        torch.ones_like(step), torch.frexp(zero_point.float()).exponent
    )
    return (
        torch.round(scale / step).mul_(step).clamp_(min=2.0**-SMALLEST).minimum(largest).float()
    )


def packed(tensor: QuantizedTensor) -> Tensor:
    """The rows of a weight as blocks, uint8 [outputs, bytes]: scale, minimum if there is one,
    fifth bits, nibbles.

    A nibble holds code j of a block low and code j + 16 high.

    Raises:
        ValueError: it has no codes, or no type holds them.
    """
    kind = block_type(tensor.spec)
    if tensor.codes is None or kind is None:
        raise ValueError("Only a weight that was encoded in integers can be stored in blocks.")
    codes = tensor.codes.view(len(tensor.codes), -1, BLOCK)
    scale, zero_point = (
        _by_block(values, codes) for values in (tensor.scale, tensor.zero_point)
    )
    parts = [_bytes_of(scale)]
    if kind.has_minimum:
        parts.append(_bytes_of(-scale * zero_point))
    if kind.bits == BYTE:
        return torch.cat([*parts, codes.view(torch.uint8)], -1).flatten(1)
    unsigned = (codes.int() + (0 if kind.has_minimum else 1 << (kind.bits - 1))).to(torch.uint8)
    if kind.bits > NIBBLE:
        parts.append(pack_bits(unsigned >> NIBBLE, 1))
    low, high = torch.split(unsigned & 15, BLOCK // 2, -1)
    return torch.cat([*parts, low | high << NIBBLE], -1).flatten(1)


def _by_block(values: Tensor, codes: Tensor) -> Tensor:
    """Scales or zero points as [outputs, blocks, 1]."""
    rows = by_row(values, codes)
    return rows.repeat_interleave(codes.shape[1] // rows.shape[1], 1)[..., None]


def _bytes_of(values: Tensor) -> Tensor:
    """Halfs, little endian."""
    return values.half().view(torch.uint8)
