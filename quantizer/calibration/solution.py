"""The result of a calibration and of the corrections after it: all that turns the float network
into the quantized one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.graph.edits import Insertion, with_weights
from quantizer.graph.ir import Graph
from quantizer.layerwise.adjustment import RoundedWeight
from quantizer.nn.load import attach_quantizer
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.qparams import QParams
from quantizer.plan.model import JoinDecision, Key
from quantizer.storage.deferred_tensor import deferred_like, loaded

_Parameters = Mapping[str, Mapping[str, Tensor]]
"""Parameters by layer and name."""


@dataclass(frozen=True)
class Solution:
    """How each (layer, role) is quantized, and what the corrections changed.

    Args:
        tensors: spec, scale, zero point and codes.
        weights: parameters of layers that replace the model's before quantization, except those
            that have codes.
        corrections: added to a layer's bias after quantization, [channels] in the dtype of its
            weight.
        notes: why a scale is not the observed one.
        insertions: layers that algorithms have inserted into the graph.
        rescaled: parameters of the float network, with which it computes the same as the model.
        algorithms: the contents of algorithms.json.
        kept: the decisions on the first batches that changed the network, by name.
        joins: how the parts of joins are quantized, by layer.
    """

    tensors: Mapping[Key, QuantizedTensor]
    weights: _Parameters = field(default_factory=dict)
    corrections: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    rescaled: _Parameters = field(default_factory=dict)
    algorithms: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    joins: Mapping[str, JoinDecision] = field(default_factory=dict)

    @property
    def specs(self) -> dict[Key, QuantizationSpec]:
        """Return the spec of each tensor."""
        return {key: tensor.spec for key, tensor in self.tensors.items()}

    def in_memory(self) -> Solution:
        """Return the same solution with deferred tensors loaded."""
        tensors = {key: tensor.mapped(loaded) for key, tensor in self.tensors.items()}
        insertions = []
        for row in self.insertions:
            weight = loaded(row.weight)
            insertions.append(replace(row, weight=weight))
        return replace(
            self,
            tensors=tensors,
            weights=loaded(dict(self.weights)),
            corrections=loaded(dict(self.corrections)),
            insertions=tuple(insertions),
            rescaled=loaded(dict(self.rescaled)),
        )

    def by_rows(self) -> Solution:
        """Return the same values with one scale per row where runs of rows share a scale, which
        no runtime supports.
        """
        tensors = {key: tensor.by_rows() for key, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)

    @property
    def positions(self) -> dict[Key, int]:
        """Return the fix positions of symmetric tensors that have one."""
        positions = {}
        for key, tensor in self.tensors.items():
            position = tensor.position
            if tensor.spec.symmetric and position is not None:
                positions[key] = position
        return positions

    def parameters(self) -> dict[str, dict[str, Tensor]]:
        """Return the parameters that are not the model's, by layer and name: replaced ones, and
        those with codes.
        """
        parameters = {layer: dict(values) for layer, values in self.weights.items()}
        for (layer, role), tensor in self.tensors.items():
            if tensor.codes is not None:
                values = parameters.setdefault(layer, {})
                name = parameter_name(role)
                values[name] = tensor.parameter()
        return parameters

    def with_weights(self, layers: _Parameters) -> Solution:
        """Return the solution with more parameters replaced."""
        weights = dict(self.weights)
        for layer, values in layers.items():
            before = weights.get(layer, {})
            weights[layer] = {**before, **values}
        return replace(self, weights=weights)

    def with_qparams(self, qparams: Mapping[str, QParams]) -> Solution:
        """Return the solution with other scales and zero points of layers' weights."""
        tensors = dict(self.tensors)
        for layer, values in qparams.items():
            key = (layer, "weights")
            tensors[key] = tensors[key].with_qparams(values)
        return replace(self, tensors=tensors)

    def with_rounded(self, layers: Mapping[str, RoundedWeight]) -> Solution:
        """Return the solution with rounded weights, and their scales."""
        qparams = {}
        weights = {}
        for layer, rounded in layers.items():
            qparams[layer] = rounded.qparams
            weights[layer] = {"weight": rounded.weight}
        solution = self.with_qparams(qparams)
        return solution.with_weights(weights)


def quantized_network(graph: Graph, solution: Solution) -> Network:
    """Return a network with the quantizers, weights and bias corrections of a solution.

    Parameters that have codes are decoded, others are quantized at once.
    """
    graph_with_weights = with_weights(graph, solution.parameters())
    network = Network(graph_with_weights)
    # Exported files keep this order, and a result folder has its own.
    for name, role in sorted(solution.tensors):
        inplace = writes_inplace(graph, name, role)
        tensor = solution.tensors[name, role]
        attach_quantizer(network.layers[name], role, tensor, inplace=inplace)
    for name, correction in solution.corrections.items():
        network.layers[name].correct_bias(correction)
    return network


def encode_parameters(graph: Graph, solution: Solution) -> Solution:
    """Return the solution with the codes of all quantized parameters that codes represent bit
    for bit.

    The codes of deferred parameters are deferred.
    """
    float_graph = graph
    graph = with_weights(graph, solution.weights)
    tensors = dict(solution.tensors)
    weights = {name: dict(values) for name, values in solution.weights.items()}
    for (name, role), tensor in solution.tensors.items():
        if not is_parameter(role) or tensor.codes is not None:
            continue
        key = parameter_name(role)
        path = graph.by_name[name].params[key]
        value = graph.tensors[path]
        quantizer = TensorQuantizer.of(tensor)
        quantized = quantizer(loaded(value))
        tensor = tensor.encoded(quantized)
        # A rounded weight may be on the GPU, where codes are not
        float_value = float_graph.tensors[float_graph.by_name[name].params[key]]
        tensor = tensor.mapped(partial(deferred_like, float_value))
        tensors[name, role] = tensor
        if tensor.codes is not None and name in weights:
            weights[name].pop(key, None)
    weights = {name: values for name, values in weights.items() if values}
    return replace(solution, tensors=tensors, weights=weights)


def writes_inplace(graph: Graph, name: str, role: str) -> bool:
    """Return whether a quantizer may overwrite its input: the output of a layer that computes
    into fresh memory.
    """
    node = graph.by_name[name]
    return role == "activation" and node.row.fresh
