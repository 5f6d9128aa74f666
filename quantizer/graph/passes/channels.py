"""A layer's weight by its channels, one view for all kinds of layers; graphs with other parameters in some layers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node


def by_channel(node: Node, weight: Tensor) -> Tensor:
    """The weight of a convolution or linear layer as [groups, a group's outputs, its inputs, taps]; often a view."""
    groups = int(node.attrs.get("groups", 1))
    table = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], weight.shape[2:].numel())
    return table.transpose(1, 2) if "transpose" in node.op else table


def scaled(node: Node, weight: Tensor, outputs: Tensor | None = None, inputs: Tensor | None = None) -> Tensor:
    """The weight with each output and each input channel multiplied by a float64 factor, rounded once."""
    table = by_channel(node, weight)
    for factor, shape in ((outputs, (len(table), -1, 1, 1)), (inputs, (len(table), 1, -1, 1))):
        if factor is not None:
            table = table * factor.to(weight.device, torch.float64).reshape(shape)
    table = table.transpose(1, 2) if "transpose" in node.op else table
    return table.reshape(weight.shape).to(weight.dtype)


def with_parameters(graph: Graph, changed: Mapping[str, Mapping[str, Tensor]]) -> Graph:
    """The graph with other weights and biases in some layers; a layer that shared one gets its own."""
    uses = Counter(path for node in graph.nodes for path in node.params.values())
    tensors, nodes = dict(graph.tensors), []
    for node in graph.nodes:
        if own := changed.get(node.name):
            paths = {key: _path(node, key, uses) for key in own}
            tensors |= {paths[key]: tensor for key, tensor in own.items()}
            # A bias that the call gave as None is a parameter now.
            attrs = {key: value for key, value in node.attrs.items() if key not in own}
            node = dataclasses.replace(node, params={**node.params, **paths}, attrs=attrs)
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes), tensors=tensors)


def _path(node: Node, key: str, uses: Mapping[str, int]) -> str:
    weight = node.params["weight"]
    beside = f"{weight.removesuffix('weight')}{key}" if weight.endswith("weight") else f"{weight}.{key}"
    path = node.params.get(key, beside)
    return f"{path}@{node.name}" if uses[weight] > 1 or uses[path] > 1 else path
