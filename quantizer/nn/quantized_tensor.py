"""How one tensor is quantized: its spec, scale and zero point, and the codes of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.codes import decode, encode
from quantizer.numerics.qparams import QParams
from quantizer.storage.deferred_tensor import DeferredTensor


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
        if spec.group_size is None or not self._is_stack_of_tensors():
            return self
        by_rows = replace(spec, qscheme="per_channel", ch_axis=0, group_size=None)
        scale = self.scale.repeat_interleave(spec.group_size)
        zero_point = self.zero_point.repeat_interleave(spec.group_size)
        return replace(self, spec=by_rows, scale=scale, zero_point=zero_point)

    def _is_stack_of_tensors(self) -> bool:
        """Return whether the tensor is a stack along the first axis with one scale for each of
        its tensors.
        """
        spec = self.spec
        if spec.group_size is None:
            return False
        if spec.qscheme != "per_channel" or self.codes is None:
            return spec.qscheme == "per_tensor"
        return self.scale.numel() == len(self.codes) // spec.group_size

    @property
    def position(self) -> int | None:
        """Return the fix position fp of an integer tensor with one power-of-two scale 2^-fp, or
        None.
        """
        is_power = self.spec.dtype == "int" and self.spec.scale_type == "poweroftwo"
        if not is_power or self.scale.dim():
            return None
        return round(-float(torch.log2(self.scale)))
