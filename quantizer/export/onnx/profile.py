"""What `--onnx_profile fast` changes: rounding is that of ONNX Runtime's kernels, and weights
are packed for them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.export.onnx.nodes import Emission
from quantizer.nn.quantized_tensor import QuantizedTensor

PACKED_DOMAIN = "com.microsoft"
"""Of MatMulNBits."""
PACKED_BITS = (4, 8)
"""The widths of codes in MatMulNBits; narrower ones take the wider."""
INT8_ACTIVATIONS = 4
"""The accuracy_level at which MatMulNBits rounds activations to 8 bits."""


def half_even(solution: Solution) -> Solution:
    """The solution with activations rounded half to even, as QuantizeLinear does: other codes
    at half-way points.
    """
    tensors = {
        key: tensor
        if is_parameter(key[1])
        else replace(tensor, spec=replace(tensor.spec, round_mode="half_even"))
        for key, tensor in solution.tensors.items()
    }
    return replace(solution, tensors=tensors)


def packed_product(name: str, weights: QuantizedTensor, x: str, y: str) -> Emission:
    """A node from `x` to `y`, its product with `weights` transposed: MatMulNBits, called
    `name`.

    Args:
        weights: [outputs, inputs], codes of 8 bits or fewer in groups of inputs.

    Source: the operator's documentation in ONNX Runtime, ContribOperators.md.
    """
    emission, spec, codes = Emission(name), weights.spec, weights.codes
    assert codes is not None
    outputs, inputs = codes.shape
    block = inputs if spec.group_size in (None, -1) else int(spec.group_size)
    bits = next(width for width in PACKED_BITS if spec.bit_width <= width)
    middle = 1 << (bits - 1) if spec.quant_min < 0 else 0
    count = -(-inputs // block)
    shifted = torch.nn.functional.pad(
        codes.to(torch.int32) + middle, (0, count * block - inputs), value=middle
    )
    operands = [
        x,
        emission.integers("codes", _packed(shifted.view(outputs, count, block), bits)),
        emission.constant("scale", weights.scale.reshape(outputs, count)),
    ]
    zeros = weights.zero_point.reshape(outputs, count) + middle
    if (zeros != 1 << (bits - 1)).any():
        operands.append(emission.integers("zero_point", _packed(zeros, bits)))
    sizes = {
        "K": inputs,
        "N": outputs,
        "bits": bits,
        "block_size": block,
        "accuracy_level": INT8_ACTIVATIONS,
    }
    emission.add("MatMulNBits", *operands, output=y, domain=PACKED_DOMAIN, **sizes)
    emission.nodes[-1].name = name
    return emission


def _packed(values: Tensor, bits: int) -> Tensor:
    """Values of the last axis in bytes, the first in the low bits; an odd one is alone in its
    byte.
    """
    if bits == 8:
        return values.to(torch.uint8)
    even = torch.nn.functional.pad(values, (0, values.shape[-1] % 2))
    return (even[..., 0::2] | even[..., 1::2] << 4).to(torch.uint8)
