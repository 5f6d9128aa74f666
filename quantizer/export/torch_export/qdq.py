"""One tensor's quantization as operators that torch's compiler and ExecuTorch know, with test
mode's values: an activation's, or a weight's with its codes. Knows no network.

torch's `quantized_decomposed` operators hold integers of 8 bits. Compilers replace them by
kernels that read neither the bounds of codes, nor a zero point of weights, nor the axis of
their scales, so they are used only where these are those of the kernels; elsewhere, plain
operators say the same.
"""

from dataclasses import dataclass

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.codes import decode

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
DEQUANTIZE_WEIGHT = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True)
class Carrier:
    """The integer type of codes, with its ends."""

    dtype: torch.dtype
    low: int
    high: int

    def offset(self, spec: QuantizationSpec) -> int:
        """What is added to codes for this type to hold them.

        >>> (
        ...     CARRIERS["uint8"].offset(QuantizationSpec()),
        ...     CARRIERS["int8"].offset(QuantizationSpec()),
        ... )
        (128, 0)
        """
        if spec.quant_min < self.low:
            return self.low - CARRIERS["int8"].low
        return self.high - CARRIERS["uint8"].high if spec.quant_max > self.high else 0


CARRIERS = {"uint8": Carrier(torch.uint8, 0, 255), "int8": Carrier(torch.int8, -128, 127)}
"""The types of activations by name: torch's compiler has fast kernels for the first,
ExecuTorch's XNNPACK for the second.
"""


class Activation(nn.Module):
    """Quantizes and dequantizes an activation that `has_operators`.

    Codes are cut to their bounds before they are rounded, which is the same. Other rounding
    modes than half_even are applied by plain operators before, so that the operator meets no
    half-way point.
    """

    def __init__(self, tensor: QuantizedTensor, carrier: Carrier) -> None:
        super().__init__()
        spec, offset = tensor.spec, carrier.offset(tensor.spec)
        self.scale, self.zero_point = float(tensor.scale), int(tensor.zero_point) + offset
        self.codes = carrier.low, carrier.high, carrier.dtype
        self.bounds: tuple[float, float] | None = None
        self.rounded = TensorQuantizer.of(tensor) if spec.round_mode != "half_even" else None
        if (
            self.rounded is None
            and (spec.quant_min + offset, spec.quant_max + offset) != self.codes[:2]
        ):
            low, high = (
                torch.tensor([spec.quant_min, spec.quant_max]) - tensor.zero_point
            ) * tensor.scale
            self.bounds = float(low), float(high)

    def forward(self, x: Tensor) -> Tensor:
        """The values of its codes."""
        if self.rounded is not None:
            x = self.rounded(x)
        elif self.bounds is not None:
            x = x.clamp(*self.bounds)
        how = self.scale, self.zero_point, *self.codes
        codes = QUANTIZE(x, *how)
        y: Tensor = DEQUANTIZE(codes, *how)
        return y if x.dtype == y.dtype else y.to(x.dtype)


def has_operators(spec: QuantizationSpec, dtype: torch.dtype | None) -> bool:
    """Whether an activation of a dtype is integers of at most 8 bits with one scale that is
    known before.
    """
    fits = (
        spec.dtype == "int"
        and spec.bit_width <= 8
        and spec.qscheme == "per_tensor"
        and not spec.is_dynamic
    )
    return fits and dtype in (torch.float32, torch.float16, torch.bfloat16)


class Weight(nn.Module):
    """A parameter that is stored as codes; called, it gives their values.

    Args:
        tensor: with codes.
        multiplied: whether it is that of a linear layer or a convolution with output channels
            along axis 0.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, tensor: QuantizedTensor, *, multiplied: bool) -> None:
        super().__init__()
        assert tensor.codes is not None
        self.spec, self.dtype = tensor.spec, tensor.dtype
        self.is_channelwise = multiplied and is_channelwise(tensor)
        scale = tensor.scale.expand(len(tensor.codes)) if self.is_channelwise else tensor.scale
        self.register_buffer(
            "codes", tensor.codes.to(torch.int8) if self.is_channelwise else tensor.codes
        )
        self.register_buffer("scale", scale.clone())
        zero_point = (
            torch.zeros(len(scale), dtype=torch.int8)
            if self.is_channelwise
            else tensor.zero_point
        )
        self.register_buffer("zero_point", zero_point)

    def forward(self) -> Tensor:
        """What the codes stand for."""
        spec = self.spec
        if self.is_channelwise:
            how = self.scale, self.zero_point, 0, spec.quant_min, spec.quant_max, torch.int8
            found: Tensor = DEQUANTIZE_WEIGHT(self.codes, *how)
            return found
        return decode(self.codes, spec, self.scale, self.zero_point, dtype=self.dtype)


def is_channelwise(tensor: QuantizedTensor) -> bool:
    """Whether a weight is what kernels multiply: int8 around zero, with one scale, or one for
    each index of axis 0.
    """
    spec = tensor.spec
    fits = (
        spec.dtype == "int"
        and spec.quant_min >= -128
        and spec.quant_max <= 127
        and tensor.dtype == torch.float32
    )
    along = spec.qscheme == "per_tensor" or (
        spec.qscheme == "per_channel" and spec.ch_axis == 0
    )
    return fits and along and not tensor.zero_point.any()
