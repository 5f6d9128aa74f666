"""Where a checkpoint in compressed-tensors holds each quantized tensor of a graph, and what it
has no place for.

Reads specs alone, so that it is known before calibration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quantizer.config.model import CAST_ONLY, QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export import Refusal
from quantizer.export.compressed_tensors.schemes import (
    input_refusal,
    is_symmetric,
    weight_refusal,
)
from quantizer.graph.ir import Graph, Node
from quantizer.graph.passes.linear_from_matmul import TRANSPOSED
from quantizer.plan.model import Key

LINEAR = "torch.nn.Linear"
_BETWEEN = "is quantized between operators, where checkpoints have no place for it"
_INPUTS_ONLY = "quantize inputs of linear layers alone, or use --deploy pt2"
_FLOAT_INPUTS = (
    "is of experts, whose inputs readers leave in float",
    "leave it float, or use --deploy pt2",
)
INSERTED = (
    "is an operator that an algorithm has put there, and the checkpoint's model has none",
    "let the algorithm fold it into a layer (no online rotations), or use --deploy pt2",
)
NOTHING = Refusal(
    "finds no linear layer with a quantized weight",
    "quantize weights, or use --deploy safetensors",
)
_SHARE = "quantize both alike, or neither: kind:head and kind:embedding name them"


@dataclass(frozen=True)
class Placement:
    """The linear layers whose weights become codes, by name, and those of `experts`: `inputs`
    has the tensor that each linear layer quantizes as its input.

    Quantized values of other parameters stay what they are, values.
    """

    linears: Mapping[str, Node]
    experts: Mapping[str, Node]
    inputs: Mapping[str, Key]
    refusals: tuple[Refusal, ...]


def place(graph: Graph, specs: Mapping[Key, QuantizationSpec]) -> Placement:
    """The place of each tensor that is quantized."""
    specs = {key: spec for key, spec in specs.items() if spec.dtype != "float32"}
    coded = {
        layer
        for (layer, role), spec in specs.items()
        if role == "weights" and spec.dtype not in CAST_ONLY
    }
    linears = {
        node.name: node
        for node in graph.nodes
        if node.name in coded and _has_place(graph, node)
    }
    experts = {
        node.name: node for node in graph.nodes if node.name in coded and node.row.experts
    }
    inputs = {layer: (layer, "input") for layer in linears if (layer, "input") in specs}
    refusals = [*insertions(graph), *([] if linears or experts else [NOTHING])]
    for (layer, role), spec in specs.items():
        readers = graph.consumers[layer]
        if is_parameter(role):
            is_coded = role == "weights" and layer in linears
            reason = weight_refusal(spec) if is_coded else shared(graph, specs, layer, role)
            reason = _of_experts(experts, specs, layer) if layer in experts else reason
        elif graph.by_name[layer].row.experts and base_role(role) == "input":
            reason = _FLOAT_INPUTS
        elif (
            graph.by_name[layer].inputs and base_role(role) == "input"
        ):  # an input of the network has none
            reason = None if inputs.get(layer) == (layer, role) else (_BETWEEN, _INPUTS_ONLY)
        elif readers and all(reader in linears and reader not in inputs for reader in readers):
            inputs |= dict.fromkeys(readers, (layer, role))
            reason = None
        else:
            reason = _BETWEEN, _INPUTS_ONLY
        refusals += [Refusal(*reason, layer, role)] if reason else []
    for layer, key in inputs.items():
        reason = input_refusal(specs[key], specs[layer, "weights"], linears[layer].rank)
        refusals += [Refusal(*reason, *key)] if reason else []
    return Placement(linears, experts, inputs, tuple(refusals))


def _of_experts(
    experts: Mapping[str, Node], specs: Mapping[Key, QuantizationSpec], layer: str
) -> tuple[str, str] | None:
    """Why the weights of experts cannot be stored as codes."""
    own = specs[layer, "weights"]
    kinds = {replace(specs[name, "weights"], group_size=None) for name in experts}
    if TRANSPOSED in experts[layer].params["weight"]:
        return (
            "is [experts, in, out], which engines store in a layout of their own",
            "use --deploy pt2, or exclude it",
        )
    if own.dtype not in ("int", "fp8_e4m3") or not is_symmetric(own):
        return f"is {own.dtype}, of which readers take no experts" if own.dtype != "int" else (
            "is asymmetric, and readers take no zero points of experts"
        ), "use symmetric integers or fp8_e4m3 for experts"
    if len(kinds) > 1:
        return (
            "is quantized otherwise than those of other experts",
            "quantize all experts alike",
        )
    return weight_refusal(own)


def _has_place(graph: Graph, node: Node) -> bool:
    """Whether it is a linear module with a weight that no other module uses."""
    path = node.params.get("weight")
    if (
        not node.is_multiplying
        or node.classes[:1] != (LINEAR,)
        or path != f"{node.scope}.weight"
    ):
        return False
    return all(user.scope == node.scope for user in graph.nodes if path in user.params.values())


def shared(
    graph: Graph, specs: Mapping[Key, QuantizationSpec], layer: str, role: str
) -> tuple[str, str] | None:
    """Why a weight cannot be stored as values: another layer uses it that quantizes it
    otherwise.
    """
    path = graph.by_name[layer].params.get("weight")
    others = [
        node.name for node in graph.nodes if path in node.params.values() and node.name != layer
    ]
    differing = [name for name in others if specs.get((name, role)) != specs[layer, role]]
    return (
        (f"is the weight of {differing[0]}, too, where it is quantized otherwise", _SHARE)
        if differing
        else None
    )


def insertions(graph: Graph) -> Iterator[Refusal]:
    """Operators that algorithms put before layers."""
    for node in graph.nodes:
        if node.target.startswith("rescale."):
            yield Refusal(*INSERTED, node.name)
