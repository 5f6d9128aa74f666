"""What calibration and the corrections after it found: all that turns the float network into
the quantized one, and the only place that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from quantizer.algorithms.adjustment import Rounded
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.graph.edits import Insertion, with_weights
from quantizer.graph.ir import Graph
from quantizer.nn.load import attach
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.qparams import QParams
from quantizer.plan.model import JoinDecision, Key
from quantizer.storage.deferred_tensor import beside, loaded


@dataclass(frozen=True)
class Solution:
    """How each (layer, role) is quantized, and what the corrections changed.

    `weights` replaces parameters of a layer, before quantization (fast finetuning), but those
    that have codes; `corrections` is added to a layer's bias after quantization, [channels] in
    the dtype of its weight; `notes` say why a scale is not the observed one. What algorithms
    did before: `insertions`, layers that the graph of the network has; `rescaled`, parameters
    of the float network, with them as good as the model; `algorithms` is algorithms.json.
    `absorption` is what data have decided on the absorption of high biases, as
    `calibration.absorption` records it. `levels` has the exponents by which data have levelled
    channels, as `calibration.level_channels` has them. `joins` says by layer how the parts of
    joins were decided to be quantized.
    """

    tensors: Mapping[Key, QuantizedTensor]
    weights: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    rescaled: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    algorithms: Mapping[str, Any] = field(default_factory=dict)
    absorption: Mapping[str, Any] = field(default_factory=dict)
    levels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    joins: Mapping[str, JoinDecision] = field(default_factory=dict)

    @property
    def specs(self) -> dict[Key, QuantizationSpec]:
        """The spec of each tensor."""
        return {key: tensor.spec for key, tensor in self.tensors.items()}

    def in_memory(self) -> Solution:
        """The same with ordinary tensors in place of deferred ones."""
        return replace(
            self,
            tensors={key: tensor.mapped(loaded) for key, tensor in self.tensors.items()},
            weights=loaded(dict(self.weights)),
            corrections=loaded(dict(self.corrections)),
            insertions=tuple(
                replace(row, weight=loaded(row.weight)) for row in self.insertions
            ),
            rescaled=loaded(dict(self.rescaled)),
        )

    def by_rows(self) -> Solution:
        """Return the same values with scales along the first axis where runs of it share one,
        which no runtime has.
        """
        return replace(
            self, tensors={key: tensor.by_rows() for key, tensor in self.tensors.items()}
        )

    @property
    def positions(self) -> dict[Key, int]:
        """The fix positions of symmetric tensors that have one."""
        known = {
            key: tensor.position
            for key, tensor in self.tensors.items()
            if tensor.spec.symmetric
        }
        return {key: at for key, at in known.items() if at is not None}

    def parameters(self) -> dict[str, dict[str, Tensor]]:
        """The parameters by layer and name that are not the model's: those replaced, and those
        that have codes.
        """
        found = {name: dict(own) for name, own in self.weights.items()}
        for (name, role), tensor in self.tensors.items():
            if tensor.codes is not None:
                found.setdefault(name, {})[parameter_name(role)] = tensor.parameter()
        return found

    def with_weights(self, layers: Mapping[str, Mapping[str, Tensor]]) -> Solution:
        """With more parameters replaced."""
        merged = {name: {**self.weights.get(name, {}), **own} for name, own in layers.items()}
        return replace(self, weights={**self.weights, **merged})

    def with_qparams(self, qparams: Mapping[str, QParams]) -> Solution:
        """With other scales and zero points of layers' weights."""
        changed = {
            (name, "weights"): self.tensors[name, "weights"].at(own)
            for name, own in qparams.items()
        }
        return replace(self, tensors={**self.tensors, **changed})

    def with_rounded(self, layers: Mapping[str, Rounded]) -> Solution:
        """With weights that are rounded, on their scales."""
        made = self.with_qparams({name: layer.qparams for name, layer in layers.items()})
        return made.with_weights(
            {name: {"weight": layer.weight} for name, layer in layers.items()}
        )


def quantized_network(graph: Graph, solution: Solution) -> Network:
    """A network with the quantizers, weights and bias corrections of `solution`.

    Parameters that have codes are what these stand for, others are quantized at once.
    """
    network = Network(with_weights(graph, solution.parameters()))
    for (name, role), tensor in solution.tensors.items():
        attach(network.layers[name], role, tensor, inplace=writes_inplace(graph, name, role))
    for name, correction in solution.corrections.items():
        network.layers[name].correct_bias(correction)
    return network


def encoded(graph: Graph, solution: Solution) -> Solution:
    """The solution with the codes of all quantized parameters, as far as codes give them back
    bit for bit.

    Those of deferred parameters are out of memory.
    """
    graph = with_weights(graph, solution.weights)
    tensors = dict(solution.tensors)
    weights = {name: dict(own) for name, own in solution.weights.items()}
    for (name, role), tensor in solution.tensors.items():
        if is_parameter(role) and tensor.codes is None:
            value = graph.tensors[graph.by_name[name].params[parameter_name(role)]]
            found = tensor.encoded(TensorQuantizer.of(tensor)(loaded(value)))
            tensors[name, role] = found.mapped(partial(beside, value))
            if tensors[name, role].codes is not None:
                weights.get(name, {}).pop(parameter_name(role), None)
    return replace(
        solution, tensors=tensors, weights={name: own for name, own in weights.items() if own}
    )


def writes_inplace(graph: Graph, name: str, role: str) -> bool:
    """Whether a quantizer may overwrite what it is given: the output of a layer that computes
    into fresh memory.
    """
    return role == "activation" and graph.by_name[name].row.fresh
