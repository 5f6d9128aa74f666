"""Which weights of a graph a GGUF file holds as blocks, and what it has no place for.

Reads specs alone, so that it is known before calibration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantizer.config.model import CAST_ONLY, QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export import Refusal
from quantizer.export.compressed_tensors.placement import LINEAR, insertions, shared
from quantizer.export.gguf.blocks import weight_refusal
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import Key

MATRIX = 2
"""Axes of a weight that blocks hold: outputs and inputs."""
_ACTIVATION = (
    "is quantized at run time, where a .gguf holds weights alone",
    "quantize weights alone (quantizer init --strategy gguf_q4_0); llama.cpp rounds inputs to "
    "int8 by itself",
)
_EXPERTS = (
    "is of experts, which are not written as blocks",
    "use --deploy compressed-tensors, or exclude experts",
)
_NOTHING = Refusal(
    "finds no quantized weight", "quantize weights (quantizer init --strategy gguf_q4_0)"
)


@dataclass(frozen=True)
class Placement:
    """The linear layers and embeddings whose weights become blocks, by name; other parameters
    stay values.
    """

    layers: Mapping[str, Node]
    refusals: tuple[Refusal, ...]


def place(graph: Graph, specs: Mapping[Key, QuantizationSpec]) -> Placement:
    """The place of each tensor that is quantized."""
    specs = {key: spec for key, spec in specs.items() if spec.dtype != "float32"}
    weights = {
        layer
        for (layer, role), spec in specs.items()
        if role == "weights" and spec.dtype not in CAST_ONLY
    }
    layers = {
        node.name: node
        for node in graph.nodes
        if node.name in weights and _is_matrix(graph, node)
    }
    has_weights = any(base_role(role) == "weights" for _, role in specs)
    refusals = [
        *insertions(graph),
        *([] if has_weights else [_NOTHING]),
        *_refusals(graph, specs, layers),
    ]
    return Placement(layers, tuple(refusals))


def _refusals(
    graph: Graph, specs: Mapping[Key, QuantizationSpec], layers: Mapping[str, Node]
) -> Iterator[Refusal]:
    for (layer, role), spec in specs.items():
        reason: tuple[str, str] | None = _ACTIVATION
        if is_parameter(role):
            is_block = role == "weights" and layer in layers
            inputs = graph.tensors[layers[layer].params["weight"]].shape[-1] if is_block else 0
            reason = (weight_refusal(spec, inputs) if is_block else None) or shared(
                graph, specs, layer, role
            )
            reason = reason or (_other_use(graph, layers, layer) if is_block else None)
            reason = _EXPERTS if graph.by_name[layer].row.experts else reason
        if reason:
            yield Refusal(*reason, layer, role)


def _other_use(graph: Graph, layers: Mapping[str, Node], layer: str) -> tuple[str, str] | None:
    """Why a weight cannot be blocks: what else uses it computes with values."""
    path = layers[layer].params["weight"]
    others = [
        node.name
        for node in graph.nodes
        if path in node.params.values() and node.name not in layers
    ]
    why = "is a parameter of {}, too, which is no linear layer or embedding"
    return (why.format(others[0]), "exclude both") if others else None


def _is_matrix(graph: Graph, node: Node) -> bool:
    """Whether its weight has a row for each output, as files do."""
    path = node.params.get("weight")
    is_layer = node.row.looks_up or node.classes[:1] == (LINEAR,)
    return is_layer and path is not None and graph.tensors[path].dim() == MATRIX
