"""Puts quantizers on a network, as a plan or a result says. The only place that does."""

from __future__ import annotations

from quantizer.engine.solution import Solution
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.nn.load import quantizer_of
from quantizer.nn.network import Network


def quantized_network(graph: Graph, solution: Solution) -> Network:
    """A network with the quantizers, weights and bias corrections of `solution`. Parameters are quantized at once."""
    network = Network(with_weights(graph, solution.weights))
    for (name, role), tensor in solution.tensors.items():
        network.layers[name].attach(role, quantizer_of(tensor, inplace=writes_inplace(graph, name, role)))
    for name, correction in solution.corrections.items():
        network.layers[name].correct_bias(correction)
    return network


def writes_inplace(graph: Graph, name: str, role: str) -> bool:
    """Whether a quantizer may overwrite what it is given: the output of a layer that computes into fresh memory."""
    return role == "activation" and graph.by_name[name].row.fresh
