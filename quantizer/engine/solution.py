"""What calibration and the corrections after it found: all that turns the float network into the quantized one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quantizer.algorithms.adjustment import Rounded
from quantizer.config.roles import parameter_name
from quantizer.graph.edits import Insertion
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.qparams import QParams
from quantizer.plan.model import Key


@dataclass(frozen=True)
class Solution:
    """How each (layer, role) is quantized, and what the corrections changed.

    `weights` replaces parameters of a layer, before quantization (fast finetuning), but those that have codes;
    `corrections` is added to a layer's bias after quantization, [channels] in the dtype of its weight; `notes` say why
    a scale is not the observed one. What algorithms did before: `insertions`, layers that the graph of the network has;
    `rescaled`, parameters of the float network, with them as good as the model; `algorithms` is algorithms.json.
    """

    tensors: Mapping[Key, QuantizedTensor]
    weights: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    rescaled: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    algorithms: Mapping[str, Any] = field(default_factory=dict)

    @property
    def positions(self) -> dict[Key, int]:
        """The fix positions of symmetric tensors that have one."""
        known = {key: tensor.position for key, tensor in self.tensors.items() if tensor.spec.symmetric}
        return {key: at for key, at in known.items() if at is not None}

    def parameters(self) -> dict[str, dict[str, Tensor]]:
        """The parameters by layer and name that are not the model's: those replaced, and those that have codes."""
        found = {name: dict(own) for name, own in self.weights.items()}
        for (name, role), tensor in self.tensors.items():
            if tensor.codes is not None:
                found.setdefault(name, {})[parameter_name(role)] = tensor.decoded()
        return found

    def with_weights(self, layers: Mapping[str, Mapping[str, Tensor]]) -> Solution:
        """With more parameters replaced."""
        merged = {name: {**self.weights.get(name, {}), **own} for name, own in layers.items()}
        return replace(self, weights={**self.weights, **merged})

    def with_qparams(self, qparams: Mapping[str, QParams]) -> Solution:
        """With other scales and zero points of layers' weights."""
        changed = {(name, "weights"): self.tensors[name, "weights"].at(own) for name, own in qparams.items()}
        return replace(self, tensors={**self.tensors, **changed})

    def with_rounded(self, layers: Mapping[str, Rounded]) -> Solution:
        """With weights that are rounded, on their scales."""
        made = self.with_qparams({name: layer.qparams for name, layer in layers.items()})
        return made.with_weights({name: {"weight": layer.weight} for name, layer in layers.items()})
