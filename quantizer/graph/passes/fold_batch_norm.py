"""A pass that folds BatchNorm into the convolutions or the linear layer before it. A batch norm
that cannot be folded becomes a scale per channel.

w' = w * gamma / sqrt(var + eps) and b' = (b - mean) * gamma / sqrt(var + eps) + beta. Source:
Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3.2 (2017).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.graph.edits import by_channel, passes_shifts, rescale_weight, with_weights
from quantizer.graph.ir import Graph, Node, references, rewire


def fold_batch_norm(graph: Graph) -> Graph:
    """Return the graph without the batch norms that have their input from multiplying layers
    which nothing else reads.

    Data movement such as a transposition may stand between, and a concatenation of channels.
    Other batch norms with running statistics become layers "channel_scale", y = x * weight +
    bias. `normal` records what a folded norm states about its layers' outputs.
    """
    weights: dict[str, dict[str, Tensor]] = {}
    normal = dict(graph.normal)
    moved: dict[str, str] = {}
    absorbed: dict[str, str] = {}
    scales: dict[str, Node] = {}
    tensors: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op != "batch_norm" or "running_mean" not in node.params:
            continue
        # With `training` a batch norm computes statistics of its input
        if node.attrs.get("training"):
            continue
        norm = _norm_of(graph, node)
        layers = _norm_layers(graph, node)
        if not layers:
            scales[node.name] = _channel_scale(node)
            dtype = graph.tensors[node.params["running_mean"]].dtype
            params = scales[node.name].params
            tensors[params["weight"]] = norm.factor.to(dtype)
            tensors[params["bias"]] = norm.shifted(0.0).to(dtype)
            continue
        first = 0
        for layer in layers:
            weight = graph.weight(layer)
            count = by_channel(layer, weight).shape[:2].numel()
            part = norm.part(first, first + count)
            first += count
            bias: Tensor | float = 0.0
            if "bias" in layer.params:
                bias = graph.tensors[layer.params["bias"]]
            weights[layer.name] = {
                "weight": rescale_weight(layer, weight, part.factor),
                "bias": part.shifted(bias).to(weight.dtype),
            }
            normal[layer.name] = part.beta, part.gamma.abs()
        moved[node.name] = next(node.refs())
        absorbed[node.name] = layers[0].name if len(layers) == 1 else moved[node.name]
    changed = with_weights(graph, weights)
    changed = changed.mapped(lambda node: scales.get(node.name, node))
    changed = changed.replaced(normal=normal, tensors={**changed.tensors, **tensors})
    return rewire(changed, moved, absorbed) if moved or scales else graph


@dataclass(frozen=True)
class _Norm:
    """The parameters of a batch norm per channel, in float64 so that the folded weights are
    rounded once.
    """

    mean: Tensor
    deviation: Tensor
    gamma: Tensor
    beta: Tensor

    @property
    def factor(self) -> Tensor:
        """Return what the norm multiplies each channel by."""
        return self.gamma / self.deviation

    def shifted(self, bias: Tensor | float) -> Tensor:
        """Return what the norm makes of a constant."""
        return (bias - self.mean) * self.factor + self.beta

    def part(self, start: int, stop: int) -> _Norm:
        """Return the norm of some of the channels."""
        channels = slice(start, stop)
        return _Norm(
            self.mean[channels],
            self.deviation[channels],
            self.gamma[channels],
            self.beta[channels],
        )


def _norm_of(graph: Graph, node: Node) -> _Norm:
    tensors = {key: graph.tensors[path].double() for key, path in node.params.items()}
    mean = tensors["running_mean"]
    variance = tensors["running_var"] + float(node.attrs.get("eps", 1e-5))
    gamma = tensors.get("weight", torch.ones_like(mean))
    beta = tensors.get("bias", torch.zeros_like(mean))
    return _Norm(mean, variance.sqrt(), gamma, beta)


def _norm_layers(graph: Graph, norm: Node) -> list[Node]:
    """Return the layers into which a batch norm can fold, in the order of their channels; none
    if it cannot.
    """
    source = _source(graph, next(norm.refs()), norm, 1)
    if source is None:
        return []
    sources: list[tuple[Node, int] | None] = [source]
    join, axis = source
    if join.op == "cat" and int(join.attrs.get("dim", 0)) % join.rank == axis:
        sources = [_source(graph, name, join, axis) for name in references(join.inputs)]
    layers: dict[str, Node] = {}
    for source in sources:
        if source is None or not _makes_channels(*source):
            return []
        layers[source[0].name] = source[0]
    return list(layers.values()) if len(layers) == len(sources) else []


def _source(graph: Graph, name: str, reader: Node, axis: int) -> tuple[Node, int] | None:
    """Return the node before all that only moves the value `name`, and the axis of its value
    that holds the channels; None if others than `reader` read it.

    Args:
        graph: the traced network.
        name: the value.
        reader: the node that reads it.
        axis: the axis of the channels in the value.
    """
    node = graph.by_name[name]
    if graph.consumers[name] != (reader.name,):
        return None
    if not node.row.only_moves or not passes_shifts(node):
        return node, axis
    # Only norms behind moves need it
    from quantizer.graph.channels.labels import moved_back

    source = graph.source(node)
    before = moved_back(graph, node, axis)
    if source is None or before is None:
        return None
    return _source(graph, source.name, node, before)


def _makes_channels(layer: Node, axis: int) -> bool:
    """Return whether a layer multiplies its only input, and has its output channels at an
    axis.
    """
    if not layer.is_multiplying or layer.inputs.keys() != {"input"}:
        return False
    if layer.shape is None or layer.row.channels is None:
        return False
    return layer.row.channels % layer.rank == axis


def _channel_scale(norm: Node) -> Node:
    """Return the layer that scales channels instead of a norm, under the same name."""
    op = "channel_scale"
    params = {key: f"{key}@{norm.name}" for key in ("weight", "bias")}
    inputs = {"input": norm.inputs["input"]}
    return replace(norm, op=op, target=op, inputs=inputs, attrs={}, params=params)
