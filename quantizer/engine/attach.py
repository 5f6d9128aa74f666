"""Puts quantizers on a network, as a plan or a result says. The only place that does."""

from __future__ import annotations

from dataclasses import replace

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.solution import Solution
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.nn.load import attach
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer


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
    """The solution with the codes of all quantized parameters, as far as codes give them back bit for bit."""
    graph = with_weights(graph, solution.parameters())
    tensors = dict(solution.tensors)
    weights = {name: dict(own) for name, own in solution.weights.items()}
    for (name, role), tensor in solution.tensors.items():
        if is_parameter(role) and tensor.codes is None:
            value = graph.tensors[graph.by_name[name].params[parameter_name(role)]]
            tensors[name, role] = tensor.encoded(TensorQuantizer.of(tensor)(value))
            if tensors[name, role].codes is not None:
                weights.get(name, {}).pop(parameter_name(role), None)
    return replace(solution, tensors=tensors, weights={name: own for name, own in weights.items() if own})


def writes_inplace(graph: Graph, name: str, role: str) -> bool:
    """Whether a quantizer may overwrite what it is given: the output of a layer that computes into fresh memory."""
    return role == "activation" and graph.by_name[name].row.fresh
