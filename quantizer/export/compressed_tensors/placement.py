"""Where a compressed-tensors checkpoint holds each tensor, and what it has no place for.

Only the specs are read, so that this is known before calibration.

Source: the package compressed-tensors, 0.15 to 0.20; the layers that vLLM builds for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from quantizer.config.model import CAST_ONLY, QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export.compressed_tensors.engine_layers import are_stored_as_one, fused_refusals
from quantizer.export.compressed_tensors.schemes import (
    FP4_FORMATS,
    cache_refusals,
    cached_keys,
    scale_difference,
)
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.limits import (
    GROUPS_OF_INPUTS,
    HALF_EVEN,
    SCALES_OF_OUTPUTS,
    Limit,
    beyond,
    is_symmetric,
)
from quantizer.export.transformers_models import family_of, insertion_refusals, value_refusal
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
_SEVERAL_CALLS = (
    "is of a module that is called several times, and a checkpoint has one static scale for it",
    "set its is_dynamic to true, or exclude the module",
)
_BYTES = ("int", "fp8_e4m3")
_PER_TOKEN = "set its qscheme to per_token, with ch_axis -1"
_WEIGHT_LIMITS = (
    Limit(
        lambda spec: (
            spec.dtype != "fp4"
            or (
                (spec.qscheme, spec.ch_axis) == ("per_group", 1)
                and (spec.group_size, spec.scale_type) in FP4_FORMATS
            )
        ),
        "is fp4, but not in groups of 32 inputs with shared exponents (mxfp4) or of 16 with "
        "e4m3 scales (nvfp4)",
        'set its group_size to 16 and its scale_format to "e4m3"',
    ),
    Limit(
        lambda spec: spec.dtype in (*_BYTES, "fp4"),
        "is {spec.dtype}, which the format lacks",
        "use int2 to int8, fp8_e4m3, mxfp4, mxfp8 or nvfp4 there",
    ),
    Limit(
        lambda spec: spec.dtype != "int" or 2 <= spec.bit_width <= 8,
        "has {spec.bit_width} bits, and the format 2 to 8",
        "set its width to 8 bits or less",
    ),
    SCALES_OF_OUTPUTS,
    GROUPS_OF_INPUTS,
    Limit(
        lambda spec: (
            (spec.dtype, spec.qscheme) != ("fp8_e4m3", "per_group")
            or (spec.scale_type, spec.group_size) == ("e8m0", 32)
        ),
        "is {spec.dtype} in groups, which readers have with shared exponents for 32 inputs "
        "only (mxfp8)",
        "set its qscheme to per_channel, per_block or per_tensor",
    ),
)
_INPUT_LIMITS = (
    Limit(
        lambda spec: spec.dtype != "int" or spec.bit_width == 8,
        "has {spec.bit_width} bits, and engines compute in 8",
        "set its width to 8 bits, or leave it float",
    ),
    HALF_EVEN,
    Limit(
        lambda spec: not spec.narrow_range,
        "has a narrow range",
        "set its narrow_range to false",
    ),
)
_EXPERT_FORMATS = "use symmetric integers or fp8_e4m3 for experts"
_EXPERT_LIMITS = (
    Limit(
        lambda spec: spec.dtype in _BYTES and spec.scale_type != "e8m0",
        "is {spec.dtype}, and readers load no experts of this format",
        _EXPERT_FORMATS,
    ),
    Limit(
        lambda spec: spec.qscheme != "per_block",
        "has scales of blocks, and transformers loads no such experts",
        "set its qscheme to per_channel, or exclude experts",
    ),
    Limit(
        is_symmetric,
        "is asymmetric, and readers take no zero points of experts",
        _EXPERT_FORMATS,
    ),
)


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
                reason = weight_refusal(spec, graph.weight(linears[layer]).shape[-1])
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
    layers = [
        layer
        for (layer, role), spec in specs.items()
        if coded and base_role(role) == "weights" and spec.is_scaled and layer not in coded
    ]
    return tuple(dict.fromkeys(layers))


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
    if TRANSPOSED in experts[layer].params["weight"]:
        return "is [experts, in, out], which engines store in a layout of their own", _EXCLUDE
    if are_stored_as_one(experts[layer]):
        family = family_of(experts[layer])
        why = f"is of experts, which files of {family} have as one tensor, without a layout"
        return f"{why} for codes", _EXCLUDE
    spec = specs[layer, "weights"]
    reason = beyond(_EXPERT_LIMITS, spec)
    if reason is not None:
        return reason
    # Groups may be of different sizes, as experts' inputs are.
    kinds = {replace(specs[name, "weights"], group_size=None) for name in experts}
    if len(kinds) > 1:
        return (
            "is quantized otherwise than those of other experts",
            "quantize all experts alike",
        )
    return weight_refusal(spec, features)


def weight_refusal(spec: QuantizationSpec, features: int) -> Reason | None:
    """Return why a linear layer's weight cannot be stored as codes; None if it can.

    Args:
        spec: of the weight.
        features: how many inputs it has.
    """
    reason = beyond(_WEIGHT_LIMITS, spec)
    return reason or _partial_groups(spec, features, "use <--deploy pt2>, or exclude the layer")


def _partial_groups(spec: QuantizationSpec, features: int, remedy: str) -> Reason | None:
    """Return why readers do not take groups that end within the inputs of a layer."""
    size = spec.group_size or -1
    if spec.qscheme != "per_group" or size < 0 or not features % size:
        return None
    return (
        f"has groups of {size} inputs, which do not divide its {features}, and readers take "
        "whole groups only",
        remedy,
    )


def input_refusal(
    spec: QuantizationSpec, weight: QuantizationSpec, rank: int, features: int
) -> Reason | None:
    """Return why a reader cannot quantize a layer's input as test mode does; None if it can.

    Args:
        spec: of the input.
        weight: the spec of the layer's weight.
        rank: how many axes the input has.
        features: the length of its last axis.
    """
    is_along_features = spec.ch_axis in (-1, rank - 1)
    is_small_float = weight.dtype != "int"
    if is_small_float and weight.scale_type == "e4m3":
        reason = _nvfp4_refusal(spec, is_along_features)
    elif is_small_float and weight.scale_type == "e8m0":
        reason = _mx_refusal(spec, weight, is_along_features)
    elif spec.dtype != weight.dtype or spec.dtype not in _BYTES:
        reason = (
            f"and weight are {spec.dtype}/{weight.dtype}, which the format cannot combine",
            "use int8 or fp8_e4m3 for both, or leave the input float",
        )
    else:
        reason = beyond(_INPUT_LIMITS, spec)
        reason = reason or _groups_refusal(spec, weight)
        reason = reason or _range_refusal(spec, is_along_features or spec.ch_axis is None)
    remedy = "leave the input float, or exclude the layer"
    return reason or _partial_groups(spec, features, remedy)


def _groups_refusal(spec: QuantizationSpec, weight: QuantizationSpec) -> Reason | None:
    """Return why engines do not combine an input with a weight in blocks, or inputs in groups
    with a weight.
    """
    if weight.qscheme != "per_block":
        if spec.qscheme != "per_group":
            return None
        return (
            f"is dynamic {spec.qscheme}, and engines have that with weights in blocks only",
            _PER_TOKEN,
        )
    size = weight.group_size or 1
    if spec.qscheme == "per_group" and spec.group_size == size and spec.is_dynamic:
        return None
    return (
        f"meets a weight in blocks of {size}, and engines then have dynamic groups of "
        f"{size} inputs",
        f"set its qscheme to per_group, with ch_axis -1 and group_size {size}, and its "
        "is_dynamic to true",
    )


def _mx_refusal(
    spec: QuantizationSpec, weight: QuantizationSpec, is_along_features: bool
) -> Reason | None:
    """Return why a reader cannot quantize the input of a weight in mxfp4 or mxfp8."""
    is_alike = (spec.dtype, spec.qscheme, spec.group_size) == (weight.dtype, "per_group", 32)
    if not (is_alike and is_along_features and spec.is_dynamic):
        return (
            f"meets a weight in mx{weight.dtype[:3]}, and readers then have dynamic groups of "
            f"32 inputs in {weight.dtype}",
            f"set its dtype to {weight.dtype}, its qscheme to per_group, with ch_axis -1 and "
            "group_size 32, and its is_dynamic to true",
        )
    if weight.dtype == "fp4" and (spec.scale_type, spec.scale_mode) != ("e8m0", "even"):
        return (
            "finds its exponents in another way than readers, which round the largest value "
            "first",
            "set its scale_calculation_mode to even",
        )
    if weight.dtype != "fp4" and spec.scale_type != "poweroftwo":
        return (
            "finds its exponents in another way than readers, which take the least power of "
            "two that clips nothing",
            'write "dtype": "fp8_e4m3" and "scale_type": "pof2" for it',
        )
    return None


def _nvfp4_refusal(spec: QuantizationSpec, is_along_features: bool) -> Reason | None:
    """Return why a reader cannot quantize the input of a weight in nvfp4."""
    is_alike = (spec.dtype, spec.scale_type, spec.group_size) == ("fp4", "e4m3", 16)
    if not (is_alike and is_along_features and spec.is_dynamic):
        return (
            "meets a weight in nvfp4, and readers then have groups of 16 inputs in fp4 with a "
            "calibrated factor",
            'write "dtype": "fp4", "scale_format": "e4m3", "ch_axis": -1 and "is_dynamic": '
            '"local" for it, or leave the input float',
        )
    if spec.is_dynamic is True:
        return (
            "finds the factor of its groups at run time, and readers have that of calibration "
            "(input_global_scale)",
            'set its is_dynamic to "local"',
        )
    return None


def _range_refusal(spec: QuantizationSpec, is_along_features: bool) -> Reason | None:
    """Return why readers cannot find the scale of a spec at run time, or have no place for a
    static one.
    """
    if not spec.is_dynamic:
        if spec.qscheme == "per_tensor":
            return None
        remedy = "set its qscheme to per_tensor, or is_dynamic to true"
        return f"is static {spec.qscheme}", remedy
    if spec.qscheme not in ("per_tensor", "per_token", "per_group") or not is_along_features:
        return f"is dynamic {spec.qscheme}", _PER_TOKEN
    difference = scale_difference(spec)
    if difference is None:
        return None
    return (
        difference,
        "set its symmetric to false and its scale_type to float, or its is_dynamic to false",
    )


def _is_own_linear(graph: Graph, node: Node) -> bool:
    """Return whether a node is a linear module with a weight that no other module uses.

    Readers take a module for a linear one by its class, or by the name of a subclass, as of
    FalconLinear.
    """
    path = node.params.get("weight")
    is_linear = bool(node.classes) and node.classes[0].endswith(_LINEAR_NAME)
    if not node.is_multiplying or not is_linear:
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
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
