"""Finds operators that torch.onnx cannot translate, before anything is calibrated."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.export.deployment import tensor_leaves
from quantizer.export.exporter import Refusal
from quantizer.export.onnx.translation import reason_of, translatable, translate_program
from quantizer.graph.ir import Graph, Node
from quantizer.graph.ops import OPS
from quantizer.graph.trace import quiet
from quantizer.nn.execution import layer_arguments
from quantizer.nn.network import build_layer

_REMEDY = "keep that part outside the quantized model, or use --deploy pt2"
_EXAMPLE_BATCH = 2
"""The size of an axis that follows the batch."""


def untranslatable_operators(graph: Graph, opset: int) -> Iterator[Refusal]:
    """Yield operators that torch.onnx has no form for, each with its first layer.

    Those with a row in the table of operators are translated. Each of the others is translated
    alone, which takes a tenth of a second. They are rare.
    """
    tried: set[str] = set()
    for node in graph.nodes:
        if node.op in OPS or node.target in tried:
            continue
        tried.add(node.target)
        if _is_translated(graph, node, opset):
            continue
        why = f"computes {node.op}, for which torch.onnx has no form"
        yield Refusal(why, _REMEDY, node.name)


class _Alone(nn.Module):
    """One layer of a graph, called with the tensors that it reads."""

    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__()
        self.node = node
        self.layer = build_layer(graph, node)
        self.sources = list(dict.fromkeys(node.refs()))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors that the layer makes."""
        values = dict(zip(self.sources, tensors, strict=True))
        arguments: dict[str, Any] = layer_arguments(self.node, values)
        return tensor_leaves(self.layer(**arguments))


def _is_translated(graph: Graph, node: Node, opset: int) -> bool:
    """Return whether torch.onnx translates a layer alone, or cannot be asked."""
    layer = _Alone(graph, node)
    tensors: list[Tensor] = []
    for name in layer.sources:
        source = graph.by_name[name]
        if source.shape is None or source.dtype is None:
            return True
        shape = _example_shape(source.shape)
        tensor = torch.zeros(shape, dtype=source.dtype)
        tensors.append(tensor)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(layer, tuple(tensors))
        program = translatable(program)
        translate_program(program, ([], []), opset)
    except torch.onnx.OnnxExporterError as error:
        reason = reason_of(error)
        return "No ONNX function" not in reason
    # What stops torch.export here did not stop the trace, so it says nothing
    except Exception:  # noqa: BLE001
        return True
    return True


def _example_shape(shape: Sequence[int | None]) -> list[int]:
    """Return a shape with a number for the batch."""
    sizes: list[int] = []
    for size in shape:
        if size is None:
            size = _EXAMPLE_BATCH
        sizes.append(size)
    return sizes
