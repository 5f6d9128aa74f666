"""The shapes that a graph's values have for a batch of two, found without computing any of them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.targets import call

BATCH = 2
_SHAPED_AS_READ = ("quant_stub", "dequant_stub", "input_scale", "rotation", "channel_scale")  # no operators of torch
_UNTOLD = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)


def fake_values(graph: Graph) -> dict[str, Any]:
    """Each node's value as tensors without memory, sizes as numbers; without nodes whose shape follows from values."""
    values: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        tensors = {path: mode.from_tensor(tensor) for path, tensor in graph.tensors.items()}
        for node in graph.nodes:
            if all(name in values for name in references(node.inputs)):
                try:
                    values[node.name] = _value(node, values, tensors)
                except _UNTOLD:
                    continue  # torch cannot tell without values, or the layer is no operator of torch
    return values


def _value(node: Node, values: dict[str, Any], tensors: dict[str, Any]) -> Any:
    if node.op == "input":
        if node.shape is None:
            return node.attrs["value"]
        return torch.empty([BATCH if size is None else size for size in node.shape], dtype=node.dtype)
    if node.op in ("parameter", "constant"):
        return tensors[node.params["weight"]]
    if node.op in _SHAPED_AS_READ:
        return values[next(iter(node.refs()))]
    params = {key: tensors[path] for key, path in node.params.items()}
    inputs = {key: map_refs(value, values.__getitem__) for key, value in node.inputs.items()}
    return call(node.target, {**node.attrs, **params, **inputs})
