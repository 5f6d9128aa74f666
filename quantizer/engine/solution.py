"""What calibration and the corrections after it found: all that turns the float network into the quantized one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import Insertion
from quantizer.numerics.qparams import QParams

Key = tuple[str, str]


@dataclass(frozen=True)
class Solution:
    """Spec, scale and zero point of each (layer, role), and what the corrections changed.

    `weights` replaces parameters of a layer, before quantization (fast finetuning); `corrections` is added to a layer's
    bias after quantization, [channels] in the dtype of its weight; `notes` say why a scale is not the observed one.
    What algorithms did before: `insertions`, layers that the graph of the network has; `rescaled`, parameters of the
    float network, with them as good as the model; `algorithms` is algorithms.json.
    """

    tensors: Mapping[Key, tuple[QuantizationSpec, Tensor, Tensor]]
    weights: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    rescaled: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    algorithms: Mapping[str, Any] = field(default_factory=dict)

    def with_weights(self, layers: Mapping[str, Mapping[str, Tensor]]) -> Solution:
        """With more parameters replaced."""
        merged = {name: {**self.weights.get(name, {}), **own} for name, own in layers.items()}
        return replace(self, weights={**self.weights, **merged})

    def on_grids(self, grids: Mapping[str, QParams]) -> Solution:
        """With other scales and zero points of layers' weights."""
        tensors = dict(self.tensors)
        for name, grid in grids.items():
            spec = tensors[name, "weights"][0]
            tensors[name, "weights"] = spec, grid.scale.cpu(), grid.zero_point.cpu()
        return replace(self, tensors=tensors)

    def adjusted_by(self, found: Adjustment, report: Mapping[str, Any]) -> Solution:
        """With what algorithms found: their parameters, and weights on their grids; `report` is algorithms.json."""
        grids = {**found.grids, **{name: layer.qparams for name, layer in found.rounded.items()}}
        weights = {name: {"weight": layer.weight} for name, layer in found.rounded.items()}
        made = replace(self, insertions=found.insertions, rescaled=found.parameters, algorithms=report)
        return made.on_grids(grids).with_weights(found.parameters).with_weights(weights)

    def position(self, key: Key) -> int | None:
        """The fix position fp of a tensor with a power-of-two scale 2^-fp per tensor; None for others."""
        found = self.tensors.get(key)
        if found is None or found[0].dtype != "int" or found[0].scale_type != "poweroftwo" or found[1].dim():
            return None
        return round(-float(torch.log2(found[1])))
