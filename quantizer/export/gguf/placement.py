"""Which weights of a graph a GGUF file holds as blocks, and what it has no place for.

Only the specs are read, so that this is known before calibration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantizer.config.model import CAST_ONLY
from quantizer.config.roles import base_role, is_parameter
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.gguf.blocks import block_refusal
from quantizer.export.stored_weights import insertion_refusals, value_refusal
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import TensorSpecs

_ACTIVATION = (
    "is quantized at run time, and a .gguf has only weights",
    "quantize only weights (`quantizer init --strategy gguf_q4_0`); llama.cpp rounds inputs to "
    "int8 by itself",
)
_NO_WEIGHT = Refusal(
    "finds no quantized weight", "quantize weights (`quantizer init --strategy gguf_q4_0`)"
)


@dataclass(frozen=True)
class BlockPlacement:
    """The linear layers and embeddings whose weights become blocks, by name.

    Other parameters stay values.
    """

    layers: Mapping[str, Node]
    refusals: tuple[Refusal, ...]


def place_blocks(graph: Graph, specs: TensorSpecs) -> BlockPlacement:
    """Return the place of each quantized tensor."""
    specs = {key: spec for key, spec in specs.items() if spec.dtype != "float32"}
    layers: dict[str, Node] = {}
    for node in graph.nodes:
        spec = specs.get((node.name, "weights"))
        if spec is not None and spec.dtype not in CAST_ONLY and _is_matrix(graph, node):
            layers[node.name] = node
    refusals = [*insertion_refusals(graph)]
    if not any(base_role(role) == "weights" for _, role in specs):
        refusals.append(_NO_WEIGHT)
    refusals += _tensor_refusals(graph, specs, layers)
    return BlockPlacement(layers, tuple(refusals))


def _tensor_refusals(
    graph: Graph, specs: TensorSpecs, layers: Mapping[str, Node]
) -> Iterator[Refusal]:
    for (layer, role), spec in specs.items():
        reason: Reason | None
        if not is_parameter(role):
            reason = _ACTIVATION
        elif role == "weights" and layer in layers:
            path = layers[layer].params["weight"]
            inputs = graph.tensors[path].shape[-1]
            reason = block_refusal(spec, inputs)
            reason = reason or value_refusal(graph, specs, layer, role)
            reason = reason or _other_use_refusal(graph, layers, layer)
        else:
            reason = value_refusal(graph, specs, layer, role)
        if reason is not None:
            why, remedy = reason
            yield Refusal(why, remedy, layer, role)


def _other_use_refusal(graph: Graph, layers: Mapping[str, Node], layer: str) -> Reason | None:
    """Return why a weight cannot be blocks if something else computes with its values."""
    path = layers[layer].params["weight"]
    for node in graph.nodes:
        if path in node.params.values() and node.name not in layers:
            why = (
                f"is also a parameter of {node.name}, which is not a linear layer or embedding"
            )
            return why, "exclude both"
    return None


def _is_matrix(graph: Graph, node: Node) -> bool:
    """Return whether a node's weight is a matrix with a row for each output."""
    path = node.params.get("weight")
    is_linear = node.row.spatial == 0
    if path is None or not (is_linear or node.row.looks_up):
        return False
    weight = graph.tensors[path]
    return weight.dim() == 2
