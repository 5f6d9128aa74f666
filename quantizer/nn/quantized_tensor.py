"""How one tensor is quantized: its spec with the scale and zero point that were found. Holds no values of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.qparams import QParams


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A spec with its `scale`, float32, and `zero_point`, int32, both of `granularity.scale_shape`.

    They are 1 and 0 where the spec needs none: in formats without a scale, and where ranges are dynamic.
    """

    spec: QuantizationSpec
    scale: Tensor = field(default_factory=lambda: torch.ones(()))
    zero_point: Tensor = field(default_factory=_zero)

    def at(self, qparams: QParams) -> QuantizedTensor:
        """The same spec with another scale and zero point, on the CPU."""
        return replace(self, scale=qparams.scale.cpu(), zero_point=qparams.zero_point.cpu())

    @property
    def position(self) -> int | None:
        """The fix position fp of an integer tensor with one power-of-two scale 2^-fp; None for others."""
        if self.spec.dtype != "int" or self.spec.scale_type != "poweroftwo" or self.scale.dim():
            return None
        return round(-float(torch.log2(self.scale)))
