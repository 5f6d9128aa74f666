"""`TensorQuantizer`, the only module that quantizes a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.codes import decode, encode
from quantizer.numerics.fake_quantize import fake_cast, fake_quantize
from quantizer.numerics.formats import cast_round_trip_, has_minimum
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.observers import axis_of
from quantizer.storage.deferred_tensor import DeferredTensor


class TensorQuantizer(nn.Module):
    """Quantizes and dequantizes a tensor by `spec`, with fixed scale and zero point or with
    those of its own range.

    Args:
        spec: number format, granularity and rounding.
        scale: float32, of `granularity.scale_shape`; () where only the ranges of groups are
            found at run time. Dynamic tensors and formats without a scale do not read it.
        zero_point: int32, same shape. Formats with a minimum have it here, as float32.
        inplace: overwrite the input. This is allowed if nothing else reads it unquantized.

    Raises:
        ValueError: a scale is needed and missing, or the axis that it goes with is.
    """

    # Both are None if they are not read
    scale: Tensor
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
        if spec.has_stored_scale and (scale is None or zero_point is None):
            raise ValueError(f"A static tensor in {spec.dtype} needs a scale and a zero point.")
        axis_of(spec)
        self.spec = spec
        self.inplace = inplace
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    @classmethod
    def of(cls, tensor: QuantizedTensor, *, inplace: bool = False) -> TensorQuantizer:
        """Return the quantizer of a tensor."""
        if not tensor.spec.has_stored_scale:
            return cls(tensor.spec, inplace=inplace)
        return cls(tensor.spec, tensor.scale, tensor.zero_point, inplace=inplace)

    @property
    def tensor(self) -> QuantizedTensor:
        """Return its spec, scale and zero point as a value."""
        if self.scale is None:
            return QuantizedTensor(self.spec)
        return QuantizedTensor(self.spec, self.scale, self.zero_point)

    @property
    def is_elementwise(self) -> bool:
        """Return whether each value is quantized by itself, without regard to other values."""
        return self.spec.has_one_scale and not self.spec.is_dynamic

    def forward(self, x: Any) -> Any:
        """Return the tensor quantized. Anything that is not a floating-point tensor, or holds
        no values, passes unchanged.

        Raises:
            ObservationError: a dynamic tensor has no range; it is a ValueError.
        """
        if self._passes(x):
            return x
        if self.inplace or self.spec.has_stored_scale or not self.spec.is_scaled:
            return self._quantized(x, inplace=self.inplace)
        # Only dynamic tensors need it
        from quantizer.nn.dynamic import quantize_once

        return quantize_once(x, self.spec, lambda: self._quantized(x, inplace=False))

    def quantized_copy(self, x: Any) -> Any:
        """Return what `forward` returns, but never overwrite `x`.

        Raises:
            ObservationError: as `forward`.
        """
        return x if self._passes(x) else self._quantized(x, inplace=False)

    def _passes(self, x: Any) -> bool:
        """Return whether a value passes unchanged."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return True
        return self.spec.is_scaled and self.spec.is_dynamic and x.numel() == 0

    def _quantized(self, x: Tensor, *, inplace: bool) -> Tensor:
        spec = self.spec
        if not spec.is_scaled:
            target = x if inplace else x.clone()
            return cast_round_trip_(target, spec.dtype)
        if not torch.is_grad_enabled():
            # torch.export records each switch, and takes long to remove them again
            return self._scaled(x, inplace=inplace)
        with torch.no_grad():
            return self._scaled(x, inplace=inplace)

    def _scaled(self, x: Tensor, *, inplace: bool) -> Tensor:
        spec = self.spec
        if not spec.is_dynamic:
            return quantize_tensor(x, spec, self.scale, self.zero_point, inplace=inplace)
        # Only dynamic tensors need it
        from quantizer.nn.dynamic import dynamic_qparams, quantize_each_row

        has_one_range = spec.qscheme == "per_tensor" or spec.scale_type == "e4m3"
        if has_one_range or torch.compiler.is_compiling():
            qparams = dynamic_qparams(x, spec, self.scale)
            return quantize_tensor(x, spec, qparams.scale, qparams.zero_point, inplace=inplace)
        rows = to_rows(x, spec.cut)
        is_copy = rows.data_ptr() != x.data_ptr()
        out = quantize_each_row(rows, spec, inplace=inplace or is_copy)
        return from_rows(out, tuple(x.shape), spec.cut)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the model. If the model is cast (`half()`), scale and zero point keep
        their dtypes.
        """
        before = {"scale": self.scale, "zero_point": self.zero_point}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, values in before.items():
            changed = getattr(self, name)
            if values is not None and changed is not None and changed.dtype != values.dtype:
                setattr(self, name, values.to(changed.device))
        return self

    def extra_repr(self) -> str:
        """Return the spec in words."""
        spec = self.spec
        kind = f"{spec.bit_width} bit" if spec.dtype == "int" else spec.dtype
        dynamic = ", dynamic" if spec.is_dynamic else ""
        if spec.is_dynamic == "local":
            dynamic = ", dynamic local"
        return f"{kind}, {spec.round_mode}, {spec.qscheme}{dynamic}"


def quantize_tensor(
    x: Tensor,
    spec: QuantizationSpec,
    scale: Tensor,
    zero_point: Tensor,
    *,
    inplace: bool = False,
) -> Tensor:
    """Return `x` quantized by `spec` with these scales, of `granularity.scale_shape`.

    >>> x = torch.tensor([[0.6, 7.0]])
    >>> quantize_tensor(x, QuantizationSpec(), torch.tensor(0.5), torch.tensor(0)).tolist()
    [[0.5, 7.0]]
    """
    shape = tuple(x.shape)
    ch_axis = axis_of(spec)
    is_along_axis = spec.qscheme == "per_channel" and spec.group_size is None
    is_plain = spec.has_one_scale or is_along_axis
    needs_rows = not is_plain or has_minimum(spec.dtype)
    if needs_rows:
        x = to_rows(x, spec.cut)
        scale = scale.reshape(-1)
        zero_point = zero_point.reshape(-1)
        ch_axis = 0
    if spec.dtype == "int":
        out = fake_quantize(
            x,
            scale,
            zero_point,
            quant_min=spec.quant_min,
            quant_max=spec.quant_max,
            round_mode=spec.round_mode,
            ch_axis=ch_axis,
            inplace=inplace,
        )
    elif has_minimum(spec.dtype):
        # Only groups with a minimum need it
        from quantizer.numerics.superblocks import fake_cast_with_minimum

        out = fake_cast_with_minimum(x, scale, zero_point, spec.dtype)
    else:
        out = fake_cast(x, scale, spec.dtype, ch_axis, inplace=inplace)
    return from_rows(out, shape, spec.cut) if needs_rows else out


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A spec with its `scale`, float32, and `zero_point`, int32, both of
    `granularity.scale_shape`.

    They are 1 and 0 if the spec needs none, as for formats without a scale and for dynamic
    ranges. `codes` are those of a parameter that computes in `dtype`, in its shape. They are
    None for activations, before the parameter is rounded, and if no codes give it back exactly.
    """

    spec: QuantizationSpec
    scale: Tensor = field(default_factory=lambda: torch.ones(()))
    zero_point: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))
    codes: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def with_qparams(self, qparams: QParams) -> QuantizedTensor:
        """Return the same spec with another scale and zero point, on the CPU, without codes."""
        scale = qparams.scale.cpu()
        return replace(self, scale=scale, zero_point=qparams.zero_point.cpu(), codes=None)

    def encoded(self, value: Tensor) -> QuantizedTensor:
        """Return it with the codes of a parameter that was quantized with this scale and zero
        point, if there are any.
        """
        codes = encode(
            value.detach(),
            self.spec,
            self.scale.to(value.device),
            self.zero_point.to(value.device),
        )
        if codes is not None:
            codes = codes.cpu()
        return replace(self, codes=codes, dtype=value.dtype)

    def decoded(self) -> Tensor:
        """Return the values of the codes, as test mode computes with them.

        Raises:
            ValueError: there are no codes.
        """
        if self.codes is None:
            raise ValueError("Only a parameter that was encoded has codes.")
        return decode(self.codes, self.spec, self.scale, self.zero_point, dtype=self.dtype)

    def parameter(self) -> Tensor:
        """Return the values of the codes, deferred if the codes are.

        Raises:
            ValueError: there are no codes.
        """
        if not isinstance(self.codes, DeferredTensor):
            return self.decoded()
        return DeferredTensor(self.codes.shape, self.dtype, self.decoded)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Return it with the tensors that `change` returns for its own, for instance on
        disk.
        """
        scale = change(self.scale)
        zero_point = change(self.zero_point)
        codes = None if self.codes is None else change(self.codes)
        return replace(self, scale=scale, zero_point=zero_point, codes=codes)

    def by_rows(self) -> QuantizedTensor:
        """Return the same values with a scale for each index of the first axis, if runs of
        indices share a scale.

        The rows of an expert share one, and so do the inputs of each group of a transposed
        convolution that has one output per group.
        """
        spec = self.spec
        size = spec.group_size
        if size is None:
            return self
        has_one_each = spec.qscheme == "per_tensor"
        if spec.qscheme == "per_channel" and self.codes is not None:
            has_one_each = self.scale.numel() == len(self.codes) // size
        if not has_one_each:
            return self
        by_rows = replace(spec, qscheme="per_channel", ch_axis=0, group_size=None)
        scale = self.scale.repeat_interleave(size)
        zero_point = self.zero_point.repeat_interleave(size)
        return replace(self, spec=by_rows, scale=scale, zero_point=zero_point)

    @property
    def position(self) -> int | None:
        """Return the fix position fp of an integer tensor with one power-of-two scale 2^-fp, or
        None.
        """
        is_power = self.spec.dtype == "int" and self.spec.scale_type == "poweroftwo"
        if not is_power or self.scale.dim():
            return None
        return round(-float(torch.log2(self.scale)))
