"""Exports single layers of a graph, to ask a compiler whether it knows their operators before
anything is calibrated.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantizer.export.deployment import tensor_leaves
from quantizer.graph.ir import Graph, Node
from quantizer.graph.ops import OPS
from quantizer.graph.tracing.trace import lean_export
from quantizer.nn.function import leave_ties_open
from quantizer.nn.network import build_layer, layer_arguments

_EXAMPLE_BATCH = 2
"""The size of an axis that follows the batch."""


def lone_programs(
    graph: Graph, doubtful: Collection[str] = ()
) -> Iterator[tuple[Node, ExportedProgram]]:
    """Yield a layer of each rare operator, and a program that has this layer alone.

    It is the first layer that can be exported alone. Operators with a row in the table of
    operators are known to compilers. The others are rare.

    Args:
        graph: of the network in float.
        doubtful: operators with a row that a compiler may not know, either.
    """
    tried: set[str] = set()
    for node in graph.nodes:
        is_known = node.op in OPS and node.op not in doubtful
        if is_known or node.target in tried:
            continue
        program = _lone_program(graph, node)
        if program is not None:
            tried.add(node.target)
            yield node, program


class _Alone(nn.Module):
    """One layer of a graph, called with the tensors that it reads."""

    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__()
        self.node = node
        self.layer = build_layer(graph, node)
        leave_ties_open([self.layer])
        self.sources = list(dict.fromkeys(node.refs()))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors that the layer makes."""
        values = dict(zip(self.sources, tensors, strict=True))
        arguments: dict[str, Any] = layer_arguments(self.node, values)
        return tensor_leaves(self.layer(**arguments))


def _lone_program(graph: Graph, node: Node) -> ExportedProgram | None:
    """Return a program of one layer, None if it does not read tensors alone."""
    layer = _Alone(graph, node)
    tensors: list[Tensor] = []
    for name in layer.sources:
        source = graph.by_name[name]
        if source.shape is None or source.dtype is None:
            return None
        shape = _example_shape(source.shape)
        tensor = torch.zeros(shape, dtype=source.dtype)
        tensors.append(tensor)
    try:
        with torch.no_grad(), lean_export():
            return torch.export.export(layer, tuple(tensors))
    # What stops torch.export here did not stop the trace, so it says nothing
    except Exception:  # noqa: BLE001
        return None


def _example_shape(shape: Sequence[int | None]) -> list[int]:
    """Return a shape with a number for the batch."""
    sizes: list[int] = []
    for size in shape:
        if size is None:
            size = _EXAMPLE_BATCH
        sizes.append(size)
    return sizes
