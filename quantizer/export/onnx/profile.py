"""What profiles change: rounding as in QuantizeLinear, and packed weights."""

from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.export.onnx.builder import NodeBuilder
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import pack_bits

PACKED_DOMAIN = "com.microsoft"
"""The domain of MatMulNBits."""
# The widths of codes in MatMulNBits; narrower codes take the wider.
_PACKED_BITS = (4, 8)
# The accuracy_level at which MatMulNBits rounds activations to 8 bits.
_INT8_ACTIVATIONS = 4


def rounded_half_even(solution: Solution) -> Solution:
    """Return the solution with activations rounded half to even, as QuantizeLinear does.

    Codes at half-way points change.
    """
    return _with_activations(solution, round_mode="half_even")


def quantized_linearly(solution: Solution) -> Solution:
    """Return the solution with activations as only QuantizeLinear makes them: rounded half to
    even, and cut off at the ends of the type.
    """
    return _with_activations(solution, round_mode="half_even", narrow_range=False)


def _with_activations(solution: Solution, **changes: Any) -> Solution:
    """Return the solution with other values of fields in the specs of activations."""
    tensors = dict(solution.tensors)
    for (layer, role), tensor in solution.tensors.items():
        if not is_parameter(role):
            spec = replace(tensor.spec, **changes)
            tensors[layer, role] = replace(tensor, spec=spec)
    return replace(solution, tensors=tensors)


def packed_product(builder: NodeBuilder, weights: QuantizedTensor, x: ir.Value) -> ir.Value:
    """Add the product of `x` with weights transposed as MatMulNBits, called `builder.name`.

    Args:
        weights: [outputs, inputs], codes of 8 bits or fewer in groups of inputs.

    Source: the operator's documentation in ONNX Runtime, ContribOperators.md.
    """
    spec, codes = weights.spec, weights.codes
    assert codes is not None
    outputs, inputs = codes.shape
    is_whole = spec.group_size in (None, -1)
    block = inputs if is_whole else int(spec.group_size or 0)
    bits = next(width for width in _PACKED_BITS if spec.bit_width <= width)
    # MatMulNBits has unsigned codes.
    middle = 1 << (bits - 1) if spec.quant_min < 0 else 0
    count = -(-inputs // block)
    unsigned = codes.to(torch.int32) + middle
    padded = torch.nn.functional.pad(unsigned, (0, count * block - inputs), value=middle)
    blocks = padded.view(outputs, count, block).to(torch.uint8)
    operands = [
        x,
        builder.constant("codes", pack_bits(blocks, bits), ir.DataType.UINT8),
        builder.constant("scale", weights.scale.reshape(outputs, count)),
    ]
    zero_points = weights.zero_point.reshape(outputs, count) + middle
    default_zero_point = 1 << (bits - 1)
    if (zero_points != default_zero_point).any():
        packed = pack_bits(zero_points.to(torch.uint8), bits)
        operands.append(builder.constant("zero_point", packed, ir.DataType.UINT8))
    return builder.add(
        "MatMulNBits",
        *operands,
        domain=PACKED_DOMAIN,
        node_name=builder.name,
        K=inputs,
        N=outputs,
        bits=bits,
        block_size=block,
        accuracy_level=_INT8_ACTIVATIONS,
    )
