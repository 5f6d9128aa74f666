"""TensorQuantizer: the only module that puts a tensor on a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.fake_quantize import fake_quantize, fake_quantize_, fake_quantize_plain
from quantizer.numerics.formats import cast_round_trip_


class TensorQuantizer(nn.Module):
    """Rounds a tensor to the grid of `spec` with a fixed scale and zero point (see DESIGN of numerics in
    ARCHITECTURE.md).

    Args:
        spec: the grid; for floating-point formats scale and zero point are not read.
        scale: float32, shape () or (channels,).
        zero_point: int32, same shape.
        inplace: overwrite the input, allowed when its producer made fresh memory that nobody else reads unquantized.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, spec: QuantizationSpec, scale: Tensor, zero_point: Tensor, *, inplace: bool = False) -> None:
        super().__init__()
        self.spec, self.inplace = spec, inplace
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def forward(self, x: Any) -> Any:
        """The tensor on its grid; anything that is not a floating-point tensor passes unchanged."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        spec = self.spec
        if spec.dtype != "int":
            return cast_round_trip_(x if self.inplace else x.clone(), spec.dtype)
        function = fake_quantize_ if self.inplace else fake_quantize
        if torch.compiler.is_exporting():  # a block loop would be unrolled for one size
            function = fake_quantize_plain
        with torch.no_grad():
            return function(
                x, self.scale, self.zero_point, spec.quant_min, spec.quant_max, spec.round_mode, ch_axis=spec.ch_axis
            )

    def extra_repr(self) -> str:
        """The grid in words."""
        spec = self.spec
        kind = f"{spec.bit_width} bit" if spec.dtype == "int" else spec.dtype
        return f"{kind}, {spec.round_mode}, {spec.qscheme}"
