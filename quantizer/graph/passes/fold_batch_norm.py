"""BatchNorm folded into the convolutions or the linear layer before it; what cannot fold
becomes a scale per channel.

w' = w * gamma / sqrt(var + eps) and b' = (b - mean) * gamma / sqrt(var + eps) + beta. Source:
Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3.2 (2017).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantizer.graph.channel_labels import ChannelLabels, passes_shifts
from quantizer.graph.edits import by_channel, rescaled, with_weights
from quantizer.graph.ir import Graph, Node, references, rewire


def fold_batch_norm(graph: Graph) -> Graph:
    """The graph without the batch norms whose input convolutions or a linear layer make for
    them alone.

    Between may stand what only moves values, as a transposition, and a concatenation of
    channels. Other batch norms with running statistics become layers "channel_scale", y = x *
    weight + bias. `normal` keeps what a folded norm says about its layers' outputs.
    """
    changed: dict[str, dict[str, Tensor]] = {}
    normal, moved, absorbed = dict(graph.normal), dict[str, str](), dict[str, str]()
    find = _Sources(graph)
    norms = [
        node
        for node in graph.nodes
        if node.op == "batch_norm" and "running_mean" in node.params
    ]
    # One that uses its statistics is affine
    norms = [node for node in norms if not node.attrs.get("training")]
    for node in norms:
        sources = find.of(node)
        weights = [graph.weight(source) for source in sources]
        outputs = [
            by_channel(*each).shape[:2].numel() for each in zip(sources, weights, strict=True)
        ]
        for source, weight, part in zip(
            sources, weights, _Norm.of(graph, node).split(outputs), strict=True
        ):
            bias = part.of_bias(
                graph.tensors[source.params["bias"]] if "bias" in source.params else 0.0
            )
            changed[source.name] = {
                "weight": rescaled(source, weight, part.factor),
                "bias": bias.to(weight.dtype),
            }
            normal[source.name] = part.beta, part.gamma.abs()
        if sources:
            moved[node.name] = next(node.refs())
            absorbed[node.name] = sources[0].name if len(sources) == 1 else moved[node.name]
    graph = with_weights(graph, changed).replaced(normal=normal) if changed else graph
    for node in norms:
        graph = graph if node.name in moved else _as_scale(graph, node)
    return rewire(graph, moved, absorbed) if moved else graph


@dataclass(frozen=True)
class _Norm:
    """A batch norm's parameters per channel, float64, so that what it changes is rounded
    once.
    """

    mean: Tensor
    deviation: Tensor
    gamma: Tensor
    beta: Tensor

    @staticmethod
    def of(graph: Graph, node: Node) -> _Norm:
        tensors = {key: graph.tensors[path].double() for key, path in node.params.items()}
        mean, variance = tensors["running_mean"], tensors["running_var"]
        gamma, beta = (
            tensors.get("weight", torch.ones_like(mean)),
            tensors.get("bias", torch.zeros_like(mean)),
        )
        return _Norm(mean, (variance + float(node.attrs.get("eps", 1e-5))).sqrt(), gamma, beta)

    @property
    def factor(self) -> Tensor:
        return self.gamma / self.deviation

    def of_bias(self, bias: Tensor | float) -> Tensor:
        """What the norm makes of a constant."""
        return (bias - self.mean) * self.factor + self.beta

    def split(self, channels: list[int]) -> list[_Norm]:
        parts = (
            torch.split(value, channels)
            for value in (self.mean, self.deviation, self.gamma, self.beta)
        )
        return [_Norm(*part) for part in zip(*parts, strict=True)] if channels else []


class _Sources:
    """Finds the layers that make what batch norms read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def labels(self) -> ChannelLabels:
        return ChannelLabels(self.graph)

    def of(self, norm: Node) -> list[Node]:
        """The layers that a batch norm can fold into, in the order of their channels; empty if
        it cannot.
        """
        made = self._maker(next(norm.refs()), norm, axis=1)
        maker, axis = made or (norm, 1)
        parts = [made]
        if maker.op == "cat" and int(maker.attrs.get("dim", 0)) % maker.rank == axis:
            parts = [self._maker(name, maker, axis) for name in references(maker.inputs)]
        layers = {
            part[0].name: part[0]
            for part in parts
            if part is not None and _makes_channels(*part)
        }
        return list(layers.values()) if len(layers) == len(parts) else []

    def _maker(self, name: str, reader: Node, axis: int) -> tuple[Node, int] | None:
        """The node before all that only moves the value `name`, and where the channels that are
        then at `axis` are in what it makes; None if others read that, too.
        """
        node = self.graph.by_name[name]
        if self.graph.consumers[name] != (reader.name,):
            return None
        if not (node.row.only_moves and passes_shifts(node)):
            return node, axis
        source, before = self.graph.source(node), self.labels.moved_back(node, axis)
        return (
            None if source is None or before is None else self._maker(source.name, node, before)
        )


def _makes_channels(layer: Node, axis: int) -> bool:
    """Whether a layer multiplies its one input to make what is along an axis."""
    if not layer.is_multiplying or set(layer.inputs) != {"input"} or layer.shape is None:
        return False
    return layer.row.channels is not None and layer.row.channels % len(layer.shape) == axis


def _as_scale(graph: Graph, node: Node) -> Graph:
    """The graph with the norm as a scale and an offset per channel, under the same name."""
    norm, dtype = _Norm.of(graph, node), graph.tensors[node.params["running_mean"]].dtype
    params = {key: f"{key}@{node.name}" for key in ("weight", "bias")}
    values = {
        params["weight"]: norm.factor.to(dtype),
        params["bias"]: norm.of_bias(0.0).to(dtype),
    }
    op, inputs = "channel_scale", {"input": node.inputs["input"]}
    scale = dataclasses.replace(node, op=op, target=op, inputs=inputs, attrs={}, params=params)
    graph = graph.mapped(lambda other: scale if other.name == node.name else other)
    return graph.replaced(tensors={**graph.tensors, **values})
