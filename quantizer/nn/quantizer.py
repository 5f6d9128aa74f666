"""TensorQuantizer: the only module that quantizes a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.nn.dynamic import dynamic_qparams, once, quantize_rows
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.fake_quantize import fake_cast, fake_quantize
from quantizer.numerics.formats import cast_round_trip_
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.observers import axis_of


class TensorQuantizer(nn.Module):
    """Quantizes and dequantizes a tensor by `spec`, with fixed scale and zero point or with
    those of its own range.

    Args:
        spec: number format, granularity and rounding.
        scale: float32, of `granularity.scale_shape`; not read for dynamic tensors and formats
            without a scale.
        zero_point: int32, same shape.
        inplace: overwrite the input, allowed when its producer made fresh memory that nobody
            else reads unquantized.

    Raises:
        ValueError: a scale is needed and missing, or the axis that it goes with is.
    """

    scale: Tensor  # None where it is not read, as the next
    zero_point: Tensor

    def __init__(
        self,
        spec: QuantizationSpec,
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
        *,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        if spec.is_scaled and not spec.is_dynamic and (scale is None or zero_point is None):
            raise ValueError(f"A static tensor in {spec.dtype} needs a scale and a zero point.")
        axis_of(spec)
        self.spec, self.inplace = spec, inplace
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    @classmethod
    def of(cls, tensor: QuantizedTensor, *, inplace: bool = False) -> TensorQuantizer:
        """The quantizer of a tensor; a dynamic one finds its scale itself, and a cast has
        none.
        """
        known = (
            (tensor.scale, tensor.zero_point)
            if tensor.spec.is_scaled and not tensor.spec.is_dynamic
            else ()
        )
        return cls(tensor.spec, *known, inplace=inplace)

    @property
    def tensor(self) -> QuantizedTensor:
        """What it does to a tensor, as a value."""
        known = () if self.scale is None else (self.scale, self.zero_point)
        return QuantizedTensor(self.spec, *known)

    def forward(self, x: Any) -> Any:
        """The tensor quantized; anything that is not a floating-point tensor, or holds no
        values, passes unchanged.

        Raises:
            ObservationError: what is to be quantized has no dynamic range; it is a ValueError.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if not self.spec.is_scaled:
            return cast_round_trip_(x if self.inplace else x.clone(), self.spec.dtype)
        with torch.no_grad():
            if not self.spec.is_dynamic:
                return place(x, self.spec, self.scale, self.zero_point, inplace=self.inplace)
            if x.numel() == 0:
                return x
            return (
                self._dynamic(x)
                if self.inplace
                else once(x, self.spec, lambda: self._dynamic(x))
            )

    def _dynamic(self, x: Tensor) -> Tensor:
        spec = self.spec
        if (
            spec.qscheme == "per_tensor"
            or spec.scale_type == "e4m3"
            or torch.compiler.is_compiling()
        ):
            found = dynamic_qparams(x, spec)
            return place(x, spec, found.scale, found.zero_point, inplace=self.inplace)
        rows = to_rows(x, *spec.cut)
        out = quantize_rows(rows, spec, inplace=self.inplace or rows.data_ptr() != x.data_ptr())
        return from_rows(out, tuple(x.shape), *spec.cut)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the model; but where that is cast (`half()`), the scale stays float32."""
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if scale is not None and self.scale is not None and self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        """The spec in words."""
        spec = self.spec
        kind = f"{spec.bit_width} bit" if spec.dtype == "int" else spec.dtype
        return f"{kind}, {spec.round_mode}, {spec.qscheme}" + (
            ", dynamic" if spec.is_dynamic else ""
        )


def place(
    x: Tensor,
    spec: QuantizationSpec,
    scale: Tensor,
    zero_point: Tensor,
    *,
    inplace: bool = False,
) -> Tensor:
    """Return `x` quantized by `spec` with these scales, of `granularity.scale_shape`.

    >>> place(
    ...     torch.tensor([[0.6, 7.0]]), QuantizationSpec(), torch.tensor(0.5), torch.tensor(0)
    ... ).tolist()
    [[0.5, 7.0]]
    """
    axis, shape = axis_of(spec), tuple(x.shape)
    is_along_axis = spec.qscheme == "per_channel" and spec.group_size is None
    cut = None if spec.has_one_scale or is_along_axis else spec.cut
    if cut:
        x, scale, zero_point, axis = (
            to_rows(x, *cut),
            scale.reshape(-1),
            zero_point.reshape(-1),
            0,
        )
    if spec.dtype == "int":
        bounds = spec.quant_min, spec.quant_max
        out = fake_quantize(
            x, scale, zero_point, *bounds, spec.round_mode, axis, inplace=inplace
        )
    else:
        out = fake_cast(x, scale, spec.dtype, axis, inplace=inplace)
    return from_rows(out, shape, *cut) if cut else out
