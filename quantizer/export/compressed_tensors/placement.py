"""Where a compressed-tensors checkpoint holds each tensor, and what it has no place for.

Only the specs are read, so that this is known before calibration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantizer.config.model import CAST_ONLY
from quantizer.config.roles import base_role, is_parameter
from quantizer.export.compressed_tensors.cache import cache_refusals, cached_keys
from quantizer.export.compressed_tensors.experts import are_stored_as_one
from quantizer.export.compressed_tensors.fusing import fused_refusals
from quantizer.export.compressed_tensors.limits import input_refusal, layer_weight_refusal
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.model_tensors import family_of
from quantizer.export.stored_weights import insertion_refusals, is_symmetric, value_refusal
from quantizer.graph.ir import Graph, Node
from quantizer.graph.passes.linear_layers import TRANSPOSED
from quantizer.plan.model import Key, TensorSpecs

_LINEAR_NAME = "Linear"
_BETWEEN_OPERATORS = (
    "is quantized between operators, and checkpoints have no place for that",
    "quantize only inputs of linear layers, or use <--deploy pt2>",
)
_EXPERT_INPUT = (
    "is of experts, whose inputs readers leave in float",
    "leave it float, or use <--deploy pt2>",
)
_EXCLUDE = "use <--deploy pt2>, or exclude it"
_NO_LAYER = "finds no linear layer with a quantized weight"
_NO_LAYER_HELP = "quantize weights, or use <--deploy safetensors>"
_OTHER_CLASS_HELP = "use <--deploy onnx, pt2 or safetensors>"


@dataclass(frozen=True)
class CodePlacement:
    """The layers whose weights become codes, by name; other parameters stay values.

    Attributes:
        inputs: the key of the tensor that each linear layer quantizes as its input.
    """

    linears: Mapping[str, Node]
    experts: Mapping[str, Node]
    inputs: Mapping[str, Key]
    refusals: tuple[Refusal, ...]


_SEVERAL_CALLS = (
    "is of a module that is called several times, and a checkpoint has one static scale for it",
    "set its is_dynamic to true, or exclude the module",
)


def place_codes(graph: Graph, specs: TensorSpecs) -> CodePlacement:
    """Return the place of each quantized tensor."""
    shared = _shared_modules(graph)
    specs = {key: spec for key, spec in specs.items() if spec.dtype != "float32"}
    linears: dict[str, Node] = {}
    experts: dict[str, Node] = {}
    for node in graph.nodes:
        spec = specs.get((node.name, "weights"))
        if spec is None or spec.dtype in CAST_ONLY:
            continue
        if _is_own_linear(graph, node) and not node.scope.startswith(shared):
            linears[node.name] = node
        if node.row.experts:
            experts[node.name] = node
    inputs = {layer: (layer, "input") for layer in linears if (layer, "input") in specs}
    cached = cached_keys(graph, specs)
    refusals = [*insertion_refusals(graph), *cache_refusals(graph, specs)]
    if not linears and not experts and not cached:
        refusals.append(_without_layers(graph, specs))
    for (layer, role), spec in specs.items():
        reason: Reason | None = None
        if is_parameter(role):
            if layer in experts:
                features = graph.weight(experts[layer]).shape[-1]
                reason = _expert_refusal(experts, specs, layer, features)
            elif role == "weights" and layer in linears:
                reason = layer_weight_refusal(spec, graph.weight(linears[layer]).shape[-1])
            else:
                reason = value_refusal(graph, specs, layer, role)
        elif (layer, role) not in cached:
            reason = _place_activation(graph, linears, inputs, (layer, role))
        if reason is not None:
            refusals.append(Refusal(*reason, layer, role))
    refusals += fused_refusals(graph, specs, linears, inputs)
    static: dict[str, Key] = {}
    for layer, key in inputs.items():
        node = linears[layer]
        features = graph.weight(node).shape[-1]
        reason = input_refusal(specs[key], specs[layer, "weights"], node.rank, features)
        if specs[key].is_dynamic is not True and static.setdefault(node.scope, key) != key:
            reason = _SEVERAL_CALLS
        if reason is not None:
            refusals.append(Refusal(*reason, *key))
    return CodePlacement(linears, experts, inputs, tuple(refusals))


def value_layers(specs: TensorSpecs, placement: CodePlacement) -> tuple[str, ...]:
    """Return the layers whose rounded weights are stored as values instead of codes.

    Without any codes there is no checkpoint: return none.
    """
    coded = {*placement.linears, *placement.experts}
    layers: dict[str, None] = {}
    for (layer, role), spec in specs.items():
        if coded and base_role(role) == "weights" and spec.is_scaled and layer not in coded:
            layers[layer] = None
    return tuple(layers)


def _without_layers(graph: Graph, specs: TensorSpecs) -> Refusal:
    """Return the refusal of a network without a linear layer to store, with the class of those
    that readers take for none.
    """
    for node in graph.nodes:
        is_quantized = (node.name, "weights") in specs
        if is_quantized and node.is_multiplying and node.classes:
            kind = node.classes[0].rpartition(".")[2]
            text = f"{_NO_LAYER}: {node.scope} is a {kind}, which readers leave in float"
            return Refusal(text, _OTHER_CLASS_HELP)
    return Refusal(_NO_LAYER, _NO_LAYER_HELP)


def _place_activation(
    graph: Graph, linears: Mapping[str, Node], inputs: dict[str, Key], key: Key
) -> Reason | None:
    """Make an activation the input of all its readers, if these are linear layers.

    Returns:
        Why that is not possible.
    """
    layer, role = key
    node = graph.by_name[layer]
    if base_role(role) == "input" and node.row.experts:
        return _EXPERT_INPUT
    # An input of the network has no inputs itself.
    if base_role(role) == "input" and node.inputs:
        return None if inputs.get(layer) == key else _BETWEEN_OPERATORS
    readers = graph.consumers[layer]
    if not readers or any(name not in linears or name in inputs for name in readers):
        return _BETWEEN_OPERATORS
    for reader in readers:
        inputs[reader] = key
    return None


def _expert_refusal(
    experts: Mapping[str, Node], specs: TensorSpecs, layer: str, features: int
) -> Reason | None:
    """Return why the weights of experts cannot be stored as codes."""
    spec = specs[layer, "weights"]
    if TRANSPOSED in experts[layer].params["weight"]:
        return "is [experts, in, out], which engines store in a layout of their own", _EXCLUDE
    if are_stored_as_one(experts[layer]):
        family = family_of(experts[layer])
        why = f"is of experts, which files of {family} have as one tensor, without a layout"
        return f"{why} for codes", _EXCLUDE
    remedy = "use symmetric integers or fp8_e4m3 for experts"
    if spec.dtype not in ("int", "fp8_e4m3") or spec.scale_type == "e8m0":
        return f"is {spec.dtype}, and readers load no experts of this format", remedy
    if spec.qscheme == "per_block":
        return (
            "has scales of blocks, and transformers loads no such experts",
            "set its qscheme to per_channel, or exclude experts",
        )
    if not is_symmetric(spec):
        return "is asymmetric, and readers take no zero points of experts", remedy
    # Groups may be of different sizes, as experts' inputs are.
    kinds = {replace(specs[name, "weights"], group_size=None) for name in experts}
    if len(kinds) > 1:
        return (
            "is quantized otherwise than those of other experts",
            "quantize all experts alike",
        )
    return layer_weight_refusal(spec, features)


def _is_own_linear(graph: Graph, node: Node) -> bool:
    """Return whether a node is a linear module with a weight that no other module uses."""
    path = node.params.get("weight")
    if not node.is_multiplying or not is_linear_class(node):
        return False
    if path != f"{node.scope}.weight":
        return False
    return all(user.scope == node.scope for user in graph.nodes if path in user.params.values())


def _shared_modules(graph: Graph) -> tuple[str, ...]:
    """Return the beginnings of the paths in modules that a model has in several places, as the
    shared block of Zamba 2. Readers tie all weights in them, also those that one place runs.
    """
    scopes_by_weight: dict[str, list[str]] = {}
    for node in graph.nodes:
        for path in node.params.values():
            scopes_by_weight.setdefault(path, []).append(node.scope)
    prefixes: set[str] = set()
    for scopes in scopes_by_weight.values():
        first = scopes[0].split(".")
        for scope in scopes[1:]:
            other = scope.split(".")
            count = _equal_at_end(first, other)
            if scope != scopes[0] and count > 1:
                for names in (first, other):
                    module = ".".join(names[: len(names) - count + 1])
                    prefixes.add(f"{module}.")
    return tuple(sorted(prefixes))


def _equal_at_end(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many names at the end of two paths are equal.

    >>> _equal_at_end(["layers", "1", "block", "q"], ["layers", "3", "block", "q"])
    2
    """
    count = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        count += 1
    return count


def is_linear_class(node: Node) -> bool:
    """Return whether readers take a layer's module for a linear one: by its class, or by the
    name of a subclass, as of FalconLinear.
    """
    return bool(node.classes) and node.classes[0].endswith(_LINEAR_NAME)
