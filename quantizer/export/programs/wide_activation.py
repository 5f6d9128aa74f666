"""Quantizes activations for kernels that find the range of their input by themselves."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear

from quantizer.export.programs.qdq import Activation, CodeType
from quantizer.nn.quantized_tensor import QuantizedTensor

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
        choose = _OPERATORS.choose_qparams.tensor
        scale, zero_point = choose(wide, low, high, _EPS, dtype)
        operands = (scale, zero_point, *self.codes)
        quantize = _OPERATORS.quantize_per_tensor.tensor
        codes = quantize(wide, *operands)
        dequantize = _OPERATORS.dequantize_per_tensor.tensor
        values: Tensor = dequantize(codes, *operands)
        return values

    def _wide_rows(self, y: Tensor) -> Tensor:
        """Return rows with the two channels, rounded with a range for each of them."""
        if y.dim() == _IMAGE_DIMENSIONS:
            # The layout of images would be changed between this quantization and the layer
            y = y.unsqueeze(0)
            y = y.squeeze(0)
        ends = linear(y, self.zeros, self.ends)
        wide = torch.cat([y, ends], -1)
        _, _, dtype = self.codes
        choose = _OPERATORS.choose_qparams_per_token_asymmetric
        scale, zero_point = choose(wide, dtype)
        operands = (scale, zero_point, *self.codes)
        codes = _OPERATORS.quantize_per_token(wide, *operands)
        dequantize = _OPERATORS.dequantize_per_token
        values: Tensor = dequantize(codes, *operands, wide.dtype)
        return values
