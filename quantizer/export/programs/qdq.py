"""Quantizes one activation or weight with operators that torch's compiler and ExecuTorch know.

torch's `quantized_decomposed` operators hold integers of 8 bits. Compilers replace them with
kernels that ignore the bounds of codes, the zero point of weights and the axis of their scales.
So the operators are used only where these are the kernels' own. Elsewhere float operators
compute the same values.

Some kernels find the range of their input by themselves; activations are widened for them.
"""

from dataclasses import dataclass

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, pad

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.codes import decode

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
QUANTIZE_WEIGHT = torch.ops.quantized_decomposed.quantize_per_channel.default
DEQUANTIZE_WEIGHT = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True)
class CodeType:
    """The integer type of an activation's codes, with its ends."""

    dtype: torch.dtype
    low: int
    high: int

    def offset(self, spec: QuantizationSpec) -> int:
        """Return what is added to codes so that this type holds them.

        >>> CODE_TYPES["uint8"].offset(QuantizationSpec())
        128
        >>> CODE_TYPES["int8"].offset(QuantizationSpec())
        0
        """
        if spec.quant_min < self.low:
            return self.low - CODE_TYPES["int8"].low
        if spec.quant_max > self.high:
            return self.high - CODE_TYPES["uint8"].high
        return 0


# torch's compiler has fast kernels for uint8, ExecuTorch's XNNPACK for int8.
CODE_TYPES = {"uint8": CodeType(torch.uint8, 0, 255), "int8": CodeType(torch.int8, -128, 127)}


class Activation(nn.Module):
    """Quantizes and dequantizes an activation that `has_operators`.

    Values are clamped to the bounds of the codes before rounding, which gives the same codes.
    Rounding modes other than half_even are applied by float operators first, so that the
    quantize operator meets no half-way point.
    """

    def __init__(self, tensor: QuantizedTensor, code_type: CodeType) -> None:
        super().__init__()
        spec = tensor.spec
        offset = code_type.offset(spec)
        self.scale = float(tensor.scale)
        self.zero_point = int(tensor.zero_point) + offset
        self.codes = code_type.low, code_type.high, code_type.dtype
        self.bounds: tuple[float, float] | None = None
        self.rounding: TensorQuantizer | None = None
        code_bounds = spec.quant_min + offset, spec.quant_max + offset
        if spec.round_mode != "half_even":
            self.rounding = TensorQuantizer.of(tensor)
        elif code_bounds != (code_type.low, code_type.high):
            ends = torch.tensor([spec.quant_min, spec.quant_max])
            low, high = (ends - tensor.zero_point) * tensor.scale
            self.bounds = float(low), float(high)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the codes of `x`."""
        if self.rounding is not None:
            x = self.rounding(x)
        elif self.bounds is not None:
            x = x.clamp(*self.bounds)
        codes = QUANTIZE(x, self.scale, self.zero_point, *self.codes)
        y: Tensor = DEQUANTIZE(codes, self.scale, self.zero_point, *self.codes)
        return y if x.dtype == y.dtype else y.to(x.dtype)


def has_operators(spec: QuantizationSpec, dtype: torch.dtype | None) -> bool:
    """Return whether an activation is integers of at most 8 bits with one static scale."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    is_narrow_integer = spec.dtype == "int" and spec.bit_width <= 8
    return is_narrow_integer and spec.qscheme == "per_tensor" and not spec.is_dynamic


class Weight(nn.Module):
    """A parameter stored as codes; calling it returns their values.

    Args:
        tensor: with codes.
        axis: that of the output channels; None if no kernel multiplies by the weight.
        codes_range: the smallest and the largest code that the operator states; those of the
            spec if None.
        requantizes: whether an operator quantizes the values, which are a constant in float.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        tensor: QuantizedTensor,
        *,
        axis: int | None,
        codes_range: tuple[int, int] | None = None,
        requantizes: bool = False,
    ) -> None:
        super().__init__()
        assert tensor.codes is not None
        codes, scale, zero_point = tensor.codes, tensor.scale, tensor.zero_point
        self.spec = tensor.spec
        self.requantizes = requantizes
        if codes_range is None:
            codes_range = tensor.spec.quant_min, tensor.spec.quant_max
        self.codes_range = codes_range
        self.dtype = tensor.dtype
        self.axis = axis
        if axis is not None and not is_channelwise(tensor, axis):
            self.axis = None
        if self.axis is not None:
            outputs = codes.shape[self.axis]
            scale = scale.expand(outputs)
            zero_point = torch.zeros(outputs, dtype=torch.int8)
            codes = codes.to(torch.int8)
            if requantizes:
                shape = [1] * codes.dim()
                shape[self.axis] = outputs
                codes = codes * scale.view(shape)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("zero_point", zero_point)

    def widen(self) -> None:
        """Add zeros for two more inputs."""
        # `pad` takes the sizes before and after each axis, from the last axis on.
        sizes = [0] * 2 * (self.codes.dim() - 2)
        self.codes = pad(self.codes, [*sizes, 0, 2])

    def forward(self) -> Tensor:
        """Return the values of the codes."""
        spec = self.spec
        if self.axis is None:
            return decode(self.codes, spec, self.scale, self.zero_point, dtype=self.dtype)
        bounds = *self.codes_range, torch.int8
        codes = self.codes
        operands = self.scale, self.zero_point, self.axis
        if self.requantizes:
            codes = QUANTIZE_WEIGHT(codes, *operands, *bounds)
        values: Tensor = DEQUANTIZE_WEIGHT(codes, *operands, *bounds)
        return values


def is_channelwise(tensor: QuantizedTensor, axis: int) -> bool:
    """Return whether kernels can multiply a weight as it is.

    That is int8 without a zero point, with one scale, or one for each index of the axis.
    """
    spec = tensor.spec
    if spec.dtype != "int" or tensor.dtype != torch.float32:
        return False
    if spec.quant_min < -128 or spec.quant_max > 127 or tensor.zero_point.any():
        return False
    by_output = spec.qscheme == "per_channel" and spec.ch_axis == axis
    return by_output or spec.qscheme == "per_tensor"


_OPERATORS = torch.ops.quantized_decomposed
_IMAGE_DIMENSIONS = 4
_EPS = 1e-12
"""A smaller step than any between codes."""


class WideActivation(Activation):
    """Quantizes an activation, and adds two channels with the least and the greatest value.

    Kernels that give floats round each row or image with its own range. With these channels,
    the range is that of the codes, so that rounding changes nothing.

    Args:
        channels: how many the activation has.
        axes: how many axes images have; 0 or None for rows.
    """

    zeros: Tensor
    ends: Tensor

    def __init__(
        self, tensor: QuantizedTensor, code_type: CodeType, channels: int, axes: int | None
    ) -> None:
        super().__init__(tensor, code_type)
        self.is_image = bool(axes)
        kernel = [1] * (axes or 0)
        zeros = torch.zeros(2, channels, *kernel)
        codes = torch.tensor([code_type.low, code_type.high])
        ends = (codes - self.zero_point) * self.scale
        self.register_buffer("zeros", zeros)
        self.register_buffer("ends", ends)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the codes of `x`, and the two channels."""
        y = super().forward(x)
        if self.is_image:
            return self._wide_image(y)
        return self._wide_rows(y)

    # A layer makes the two channels, because XNNPACK takes no slices of batches whose size is
    # open.

    def _wide_image(self, y: Tensor) -> Tensor:
        """Return an image with the two channels, rounded with one range for all of it."""
        ends = conv2d(y, self.zeros, self.ends)
        wide = torch.cat([y, ends], 1)
        low, high, dtype = self.codes
        qparams = _OPERATORS.choose_qparams.tensor(wide, low, high, _EPS, dtype)
        operands = (*qparams, *self.codes)
        codes = _OPERATORS.quantize_per_tensor.tensor(wide, *operands)
        values: Tensor = _OPERATORS.dequantize_per_tensor.tensor(codes, *operands)
        return values

    def _wide_rows(self, y: Tensor) -> Tensor:
        """Return rows with the two channels, rounded with a range for each of them."""
        if y.dim() == _IMAGE_DIMENSIONS:
            # The layout of images would be changed between this quantization and the layer
            y = y.unsqueeze(0)
            y = y.squeeze(0)
        ends = linear(y, self.zeros, self.ends)
        wide = torch.cat([y, ends], -1)
        qparams = _OPERATORS.choose_qparams_per_token_asymmetric(wide, self.codes[2])
        operands = (*qparams, *self.codes)
        codes = _OPERATORS.quantize_per_token(wide, *operands)
        values: Tensor = _OPERATORS.dequantize_per_token(codes, *operands, wide.dtype)
        return values
