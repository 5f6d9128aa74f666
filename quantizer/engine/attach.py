"""Puts quantizers on a network, as a plan or a result says. The only place that does."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer

QParamsByTensor = Mapping[tuple[str, str], tuple[QuantizationSpec, Tensor, Tensor]]


def quantized_network(graph: Graph, qparams: QParamsByTensor) -> Network:
    """A network with the quantizers of `qparams`: spec, scale, zero point. Weights are quantized at once."""
    network = Network(graph)
    for (name, role), (spec, scale, zero_point) in qparams.items():
        quantizer = TensorQuantizer(spec, scale, zero_point, inplace=writes_inplace(graph, name, role))
        network.layers[name].attach(role, quantizer)
    return network


def writes_inplace(graph: Graph, name: str, role: str) -> bool:
    """Whether a quantizer may overwrite what it is given: the output of a layer that computes into fresh memory."""
    return role == "activation" and graph.by_name[name].row.fresh
