"""Removes from a model what shows where it was made: traces, internal names, stale shapes."""

import re
from collections.abc import Mapping, Sequence

import onnx
from onnx import ModelProto

import quantizer
from quantizer.export.onnx.marks import MARK_DOMAIN
from quantizer.export.onnx.profile import PACKED_DOMAIN
from quantizer.graph.ir import Graph

# torch's name for an open size, alone or in a formula.
_SYMBOL = re.compile(r"\b[su]\d+\b")


def clean_proto(
    model: ModelProto,
    graph: Graph,
    input_names: Sequence[str],
) -> None:
    """Remove metadata and value shapes, and name producer, graph, domains and open sizes."""
    model.producer_name = "quantizer"
    model.producer_version = quantizer.__version__
    _set_domains(model)
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.graph.value_info[:]
    model.graph.name = graph.model
    model.graph.doc_string = ""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    names = _size_names(model, graph, input_names)
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                size = dimension.dim_param
                dimension.dim_param = _SYMBOL.sub(
                    lambda symbol: names[symbol[0]],
                    size,
                )


def _set_domains(model: ModelProto) -> None:
    domains: dict[str, int] = {}
    for entry in model.opset_import:
        if entry.domain not in (MARK_DOMAIN, PACKED_DOMAIN):
            domains[entry.domain] = entry.version
    if any(node.domain == PACKED_DOMAIN for node in model.graph.node):
        domains[PACKED_DOMAIN] = 1
    del model.opset_import[:]
    for domain, version in domains.items():
        model.opset_import.append(onnx.helper.make_opsetid(domain, version))


def _size_names(
    model: ModelProto,
    graph: Graph,
    input_names: Sequence[str],
) -> Mapping[str, str]:
    """Return what torch's symbols stand for: the batch, a length, or a size from values.

    The latter are called "size_1" and so on.
    """
    shapes = [node.shape for node in graph.nodes if node.op == "input"]
    tensors = [index for index, shape in enumerate(shapes) if shape is not None]
    lengths: dict[tuple[int, int], str] = {}
    for length in graph.lengths:
        for axis in length.axes:
            lengths[axis] = length.name
    names: dict[str, str] = {}
    for value in model.graph.input:
        index = tensors[input_names.index(value.name)]
        for axis_number, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.HasField("dim_param"):
                name = lengths.get((index, axis_number), "batch")
                names[dimension.dim_param] = name
    count = 0
    for value in model.graph.output:
        for dimension in value.type.tensor_type.shape.dim:
            for symbol in _SYMBOL.findall(dimension.dim_param):
                if symbol not in names:
                    count += 1
                    names[symbol] = f"size_{count}"
    return names
