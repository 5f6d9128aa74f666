"""The shapes that a graph's values have for a batch of two, found without computing any of them."""

from __future__ import annotations

from typing import Any

import torch

from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.targets import call

BATCH = 2
META = torch.device("meta")
_UNKNOWN = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)


def meta_values(graph: Graph) -> dict[str, Any]:
    """Each node's value as tensors without memory, sizes as numbers; without nodes whose shape follows from values."""
    values: dict[str, Any] = {}
    tensors = {path: tensor.to(META) for path, tensor in graph.tensors.items()}
    with torch.no_grad():
        for node in graph.nodes:
            if all(name in values for name in references(node.inputs)):
                try:
                    values[node.name] = _value(node, values, tensors)
                except _UNKNOWN:
                    continue  # the shape follows from values, or the layer is no operator of torch
    return values


def _value(node: Node, values: dict[str, Any], tensors: dict[str, Any]) -> Any:
    if node.op == "input":
        if node.shape is None:
            return node.attrs["value"]
        return torch.empty([BATCH if size is None else size for size in node.shape], dtype=node.dtype, device=META)
    if node.op in ("parameter", "constant"):
        return tensors[node.params["weight"]]
    if not node.row.aten:  # a layer of this package, shaped as what it reads
        return values[next(iter(node.refs()))]
    params = {key: tensors[path] for key, path in node.params.items()}
    inputs = {key: map_refs(value, values.__getitem__) for key, value in node.inputs.items()}
    attrs = {key: META if isinstance(value, torch.device) else value for key, value in node.attrs.items()}
    arguments = {**attrs, **params, **inputs}
    if node.target == "aten.view.default":  # attention on this device may lay out its result so that it has no view
        return arguments["input"].reshape(arguments["size"])
    return call(node.target, arguments)
