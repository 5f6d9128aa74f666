"""How one tensor is quantized: its spec, scale and zero point, and a parameter's codes. Rounds
nothing.
"""

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

    They are 1 and 0 where the spec needs none: in formats without a scale, and where ranges are
    dynamic. `codes` are those of a parameter that computes in `dtype`, in its shape; None for
    activations, before the parameter is rounded, and where no codes give it back exactly.
    """

    spec: QuantizationSpec
    scale: Tensor = field(default_factory=lambda: torch.ones(()))
    zero_point: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))
    codes: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def at(self, qparams: QParams) -> QuantizedTensor:
        """The same spec with another scale and zero point, on the CPU, for which there are no
        codes yet.
        """
        return replace(
            self, scale=qparams.scale.cpu(), zero_point=qparams.zero_point.cpu(), codes=None
        )

    def encoded(self, value: Tensor) -> QuantizedTensor:
        """With the codes of a parameter that was quantized with this scale and zero point, if
        there are any.
        """
        codes = encode(value.detach().cpu(), self.spec, self.scale.cpu(), self.zero_point.cpu())
        return replace(self, codes=codes, dtype=value.dtype)

    def decoded(self) -> Tensor:
        """What the codes stand for, as test mode computes with it.

        Raises:
            ValueError: there are none.
        """
        if self.codes is None:
            raise ValueError("Only a parameter that was encoded has codes.")
        return decode(self.codes, self.spec, self.scale, self.zero_point, self.dtype)

    def parameter(self) -> Tensor:
        """What the codes stand for; deferred, if they are.

        Raises:
            ValueError: there are none.
        """
        if not isinstance(self.codes, DeferredTensor):
            return self.decoded()
        return DeferredTensor(self.codes.shape, self.dtype, self.decoded)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """With its tensors as `change` gives them, out of memory or into it."""
        codes = None if self.codes is None else change(self.codes)
        return replace(
            self, scale=change(self.scale), zero_point=change(self.zero_point), codes=codes
        )

    def by_rows(self) -> QuantizedTensor:
        """Return the same values with a scale for each index of the first axis, where runs of
        them share one.

        That is so for the rows of an expert, and for the inputs of each group of a transposed
        convolution where these make one output.
        """
        spec = self.spec
        if spec.group_size is None or not self._has_scales_of_runs():
            return self
        rows = replace(spec, qscheme="per_channel", ch_axis=0, group_size=None)
        scale, zero_point = (
            each.repeat_interleave(spec.group_size) for each in (self.scale, self.zero_point)
        )
        return replace(self, spec=rows, scale=scale, zero_point=zero_point)

    def _has_scales_of_runs(self) -> bool:
        """Whether the tensor is a stack along the first axis with one scale for each of its
        tensors.
        """
        if self.spec.qscheme == "per_tensor":
            return self.spec.group_size is not None
        if (
            self.spec.qscheme != "per_channel"
            or self.codes is None
            or self.spec.group_size is None
        ):
            return False
        stacked = len(self.codes) // self.spec.group_size
        return self.scale.numel() == stacked

    @property
    def position(self) -> int | None:
        """The fix position fp of an integer tensor with one power-of-two scale 2^-fp; None for
        others.
        """
        if self.spec.dtype != "int" or self.spec.scale_type != "poweroftwo" or self.scale.dim():
            return None
        return round(-float(torch.log2(self.scale)))
