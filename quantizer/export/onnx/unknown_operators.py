"""Finds operators that torch.onnx cannot translate, before anything is calibrated."""

from collections.abc import Iterator

import torch

from quantizer.export.exporter import Refusal
from quantizer.export.lone_layers import lone_programs
from quantizer.export.onnx.translation import reason_of, translatable, translate_program
from quantizer.graph.ir import Graph

_DOUBTFUL = ("histc", "median", "prod", "searchsorted", "sort")
"""Operators in the table of operators of which torch.onnx knows only some calls."""
_REMEDY = "keep that part outside the quantized model, or use <--deploy pt2>"


def untranslatable_operators(graph: Graph, opset: int) -> Iterator[Refusal]:
    """Yield operators that torch.onnx has no form for, each with its first layer.

    Each rare operator is translated alone, which takes a tenth of a second. A plan and an
    export ask of the same graph.
    """
    key = f"untranslatable in operator set {opset}"
    refusals = graph.derived.get(key)
    if refusals is None:
        refusals = list(_untranslatable_operators(graph, opset))
        graph.derived[key] = refusals
    yield from refusals


def _untranslatable_operators(graph: Graph, opset: int) -> Iterator[Refusal]:
    for node, program in lone_programs(graph, _DOUBTFUL):
        try:
            written_out = translatable(program)
            translate_program(written_out, ([], []), opset)
        except torch.onnx.OnnxExporterError as error:
            reason = reason_of(error)
            why = f"computes {node.op}, for which torch.onnx has no form: {reason}"
            yield Refusal(why, _REMEDY, node.name)
