"""What calibration and the corrections after it found: all that turns the float network into the quantized one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec

Key = tuple[str, str]


@dataclass(frozen=True)
class Solution:
    """Spec, scale and zero point of each (layer, role), and what the corrections changed.

    `weights` replaces parameters of a layer, before quantization (fast finetuning); `corrections` is added to a layer's
    bias after quantization, [channels] in the dtype of its weight; `notes` say why a scale is not the observed one.
    """

    tensors: Mapping[Key, tuple[QuantizationSpec, Tensor, Tensor]]
    weights: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)

    def position(self, key: Key) -> int | None:
        """The fix position fp of a tensor with a power-of-two scale 2^-fp per tensor; None for others."""
        found = self.tensors.get(key)
        if found is None or found[0].dtype != "int" or found[0].scale_type != "poweroftwo" or found[1].dim():
            return None
        return round(-float(torch.log2(found[1])))
