"""BatchNorm folded into the convolution or linear layer before it.

w' = w * gamma / sqrt(var + eps) and b' = (b - mean) * gamma / sqrt(var + eps) + beta. Source: Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2 (2017).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node, rewire


def fold_batch_norm(graph: Graph) -> Graph:
    """The graph without the batch norms that follow a convolution or a linear layer whose output nobody else reads."""
    tensors = dict(graph.tensors)
    folded: dict[str, Node] = {}
    moved: dict[str, str] = {}
    owners: dict[str, int] = {}
    for node in graph.nodes:
        for path in node.params.values():
            owners[path] = owners.get(path, 0) + 1
    for norm in graph.nodes:
        source = _foldable(graph, norm)
        if source is None:
            continue
        # A weight that another layer uses too must keep its values there.
        shared = owners[source.params["weight"]] > 1
        stem = f"{source.params['weight']}@{source.name}" if shared else source.params["weight"]
        params = {
            "weight": stem,
            "bias": f"{stem.removesuffix('weight')}bias" if stem.endswith("weight") else f"{stem}.bias",
        }
        tensors[params["weight"]], tensors[params["bias"]] = _fold(source, norm, graph.tensors)
        inputs = {key: value for key, value in source.inputs.items() if key != "bias"}
        attrs = {key: value for key, value in source.attrs.items() if key != "bias"}
        folded[source.name] = dataclasses.replace(source, params=params, inputs=inputs, attrs=attrs)
        moved[norm.name] = source.name
    graph = graph.replaced(nodes=tuple(folded.get(node.name, node) for node in graph.nodes), tensors=tensors)
    return rewire(graph, moved, moved) if moved else graph


def _foldable(graph: Graph, norm: Node) -> Node | None:
    """The layer a batch norm can fold into."""
    if norm.op != "batch_norm" or "running_mean" not in norm.params or norm.attrs.get("training"):
        return None
    source = graph.by_name[next(norm.refs())]
    folds = source.op.startswith("conv") or (
        source.op == "linear" and source.shape is not None and len(source.shape) == 2
    )
    owns = "weight" in source.params and "bias" not in source.inputs
    return source if folds and owns and graph.consumers[source.name] == (norm.name,) else None


def _fold(source: Node, norm: Node, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """New weight and bias, computed in float64 and rounded once."""
    weight = tensors[source.params["weight"]]
    mean, variance = (tensors[norm.params[key]].double() for key in ("running_mean", "running_var"))
    factor = (variance + float(norm.attrs.get("eps", 1e-5))).rsqrt()
    if "weight" in norm.params:
        factor = factor * tensors[norm.params["weight"]].double()
    bias = tensors[source.params["bias"]].double() if "bias" in source.params else torch.zeros_like(mean)
    shift = tensors[norm.params["bias"]].double() if "bias" in norm.params else torch.zeros_like(mean)
    new_bias = (bias - mean) * factor + shift
    if "transpose" in source.op:
        groups = int(source.attrs.get("groups", 1))
        grouped = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        scaled = (grouped * factor.reshape(groups, 1, weight.shape[1], 1)).reshape(weight.shape)
    else:
        scaled = weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))
    return scaled.to(weight.dtype), new_bias.to(weight.dtype)
