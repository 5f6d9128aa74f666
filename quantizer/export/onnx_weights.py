"""Weights and biases as integer codes with a DequantizeLinear. Knows no network."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.export.onnx_nodes import Emission, Quantization
from quantizer.export.onnx_tensors import INT32, Carrier, carrier_of
from quantizer.numerics.fake_quantize import quantize


def quantize_parameter(wanted: Quantization, values: Tensor, name: str, opset: int) -> Emission | None:
    """Codes, scale, zero point and the node that makes `values` of them under `name`; None where floats have to stay.

    Floats stay, exact as they are, in floating-point formats and where float32 cannot compute the value from the code:
    in grids beyond 24 bits. `values` lie on the grid already.
    """
    spec = wanted.spec
    carrier = _carrier(wanted, opset)
    if carrier is None:
        return None
    codes = quantize(
        values, wanted.scale, wanted.zero_point, spec.quant_min, spec.quant_max, "half_even", ch_axis=spec.ch_axis
    )
    if not torch.equal(_dequantized(wanted, codes), values):
        return None
    emission = Emission(f"{wanted.layer}.{wanted.role}")
    inputs = [emission.codes("codes", codes, carrier), emission.constant("scale", wanted.scale)]
    if carrier is not INT32:
        inputs.append(emission.codes("zero_point", wanted.zero_point, carrier))
    axis = {} if spec.ch_axis is None else {"axis": spec.ch_axis}
    emission.add("DequantizeLinear", *inputs, output=name, **axis)
    return emission


def _carrier(wanted: Quantization, opset: int) -> Carrier | None:
    """The type of the codes; DequantizeLinear takes 32-bit ones without a zero point."""
    if wanted.spec.dtype != "int":
        return None
    narrow = carrier_of(wanted.spec, opset)
    if narrow is not None or wanted.zero_point.any() or wanted.spec.quant_max > INT32.high:
        return narrow
    return INT32


def _dequantized(wanted: Quantization, codes: Tensor) -> Tensor:
    """(code - zero_point) * scale as DequantizeLinear computes it: in float32."""
    shape = [1] * codes.ndim
    if wanted.spec.ch_axis is not None:
        shape[wanted.spec.ch_axis] = -1
    zero_point, scale = wanted.zero_point.reshape(shape), wanted.scale.reshape(shape)
    return (codes.to(torch.int64) - zero_point).to(torch.float32) * scale
