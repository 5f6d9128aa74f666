"""BatchNorm folded into the convolutions or the linear layer before it; what cannot fold becomes a scale per channel.

w' = w * gamma / sqrt(var + eps) and b' = (b - mean) * gamma / sqrt(var + eps) + beta. Source: Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2 (2017).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.graph.edits import by_channel, rescaled, with_weights
from quantizer.graph.ir import Graph, Node, references, rewire


def fold_batch_norm(graph: Graph) -> Graph:
    """The graph without the batch norms whose input convolutions or a linear layer make for them alone.

    These may also be joined by a concatenation of channels. Other batch norms with running statistics become layers
    "channel_scale", y = x * weight + bias. `normal` keeps what a folded norm says about its layers' outputs.
    """
    changed: dict[str, dict[str, Tensor]] = {}
    normal, moved = dict(graph.normal), dict[str, str]()
    norms = [node for node in graph.nodes if node.op == "batch_norm" and "running_mean" in node.params]
    norms = [node for node in norms if not node.attrs.get("training")]  # one that uses its statistics is affine
    for node in norms:
        sources = _sources(graph, node)
        weights = [graph.weight(source) for source in sources]
        outputs = [by_channel(*each).shape[:2].numel() for each in zip(sources, weights, strict=True)]
        for source, weight, part in zip(sources, weights, _Norm.of(graph, node).split(outputs), strict=True):
            bias = part.of_bias(graph.tensors[source.params["bias"]] if "bias" in source.params else 0.0)
            changed[source.name] = {"weight": rescaled(source, weight, part.factor), "bias": bias.to(weight.dtype)}
            normal[source.name] = part.beta, part.gamma.abs()
            moved[node.name] = next(node.refs())
    graph = with_weights(graph, changed).replaced(normal=normal) if changed else graph
    for node in norms:
        graph = graph if node.name in moved else _as_scale(graph, node)
    return rewire(graph, moved, moved) if moved else graph


@dataclass(frozen=True)
class _Norm:
    """A batch norm's parameters per channel, float64, so that what it changes is rounded once."""

    mean: Tensor
    deviation: Tensor
    gamma: Tensor
    beta: Tensor

    @staticmethod
    def of(graph: Graph, node: Node) -> _Norm:
        tensors = {key: graph.tensors[path].double() for key, path in node.params.items()}
        mean, variance = tensors["running_mean"], tensors["running_var"]
        gamma, beta = tensors.get("weight", torch.ones_like(mean)), tensors.get("bias", torch.zeros_like(mean))
        return _Norm(mean, (variance + float(node.attrs.get("eps", 1e-5))).sqrt(), gamma, beta)

    @property
    def factor(self) -> Tensor:
        return self.gamma / self.deviation

    def of_bias(self, bias: Tensor | float) -> Tensor:
        """What the norm makes of a constant."""
        return (bias - self.mean) * self.factor + self.beta

    def split(self, channels: list[int]) -> list[_Norm]:
        parts = (torch.split(value, channels) for value in (self.mean, self.deviation, self.gamma, self.beta))
        return [_Norm(*part) for part in zip(*parts, strict=True)] if channels else []


def _sources(graph: Graph, norm: Node) -> list[Node]:
    """The layers that a batch norm can fold into, in the order of their channels; empty if it cannot."""
    source = graph.by_name[next(norm.refs())]
    if source.op != "cat":
        return [source] if _can_take(graph, source, norm) else []
    names = list(references(source.inputs))
    joins_channels = source.attrs.get("dim", 0) in (1, 1 - source.rank)
    layers = [graph.by_name[name] for name in names]
    alone = graph.consumers[source.name] == (norm.name,) and len(set(names)) == len(names)
    return layers if joins_channels and alone and all(_can_take(graph, layer, source) for layer in layers) else []


def _can_take(graph: Graph, layer: Node, reader: Node) -> bool:
    """Whether the layer's channels are dimension 1 and `reader` alone reads them."""
    if not layer.is_multiplying or set(layer.inputs) != {"input"} or layer.shape is None:
        return False
    batched = len(layer.shape) == graph.weight(layer).dim()
    return batched and graph.consumers[layer.name] == (reader.name,)


def _as_scale(graph: Graph, node: Node) -> Graph:
    """The graph with the norm as a scale and an offset per channel, under the same name."""
    norm, dtype = _Norm.of(graph, node), graph.tensors[node.params["running_mean"]].dtype
    params = {key: f"{key}@{node.name}" for key in ("weight", "bias")}
    values = {params["weight"]: norm.factor.to(dtype), params["bias"]: norm.of_bias(0.0).to(dtype)}
    op, inputs = "channel_scale", {"input": node.inputs["input"]}
    scale = dataclasses.replace(node, op=op, target=op, inputs=inputs, attrs={}, params=params)
    graph = graph.mapped(lambda other: scale if other.name == node.name else other)
    return graph.replaced(tensors={**graph.tensors, **values})
