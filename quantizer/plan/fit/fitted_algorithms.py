"""Fit the algorithms of a config to a model. Add SmoothQuant where one static scale would serve
the inputs of linear layers badly, and leave out algorithms without a layer to change.
"""

import copy

from quantizer.config.algorithms import keeps_super_blocks
from quantizer.config.diagnostics import ConfigError
from quantizer.config.json_types import JsonObject
from quantizer.config.model import Algorithm, QuantizationSpec
from quantizer.config.wording import counted, first_names
from quantizer.graph.structure.definitions import InputGroup, Structure
from quantizer.graph.structure.find import find_structure
from quantizer.numerics.codes import bits_of
from quantizer.plan.fit.fitted_layers import behind_norms
from quantizer.plan.fit.fitting import Fitting
from quantizer.plan.model import Plan

_SMOOTHED_BITS = 8
_SMOOTHQUANT = {"name": "smoothquant", "alpha": 0.5, "scale_clamp_min": 0.001}
"""The entry of the preset smoothquant_int8."""


def smooth_normalized_inputs(fitting: Fitting) -> None:
    """Add SmoothQuant where linear layers read a normalization through one static scale."""
    algorithms = fitting.config.algorithms
    is_rescaled = any(algorithm.stage == "rescale" for algorithm in algorithms)
    if fitting.is_for_dpu or is_rescaled:
        return
    layers = []
    for layer in behind_norms(fitting.graph):
        spec = _input_spec(fitting.plan, layer)
        if spec is not None and _has_one_static_scale(spec):
            layers.append(layer)
    if not layers or not _can_smooth(find_structure(fitting.graph), layers):
        return
    key = "algorithms"
    if fitting.is_hierarchical:
        key = "pre_quant_opt_config"
    names = first_names(fitting.names(layers), 2)
    fitting.change(
        _with_smoothquant(fitting.document, key, is_for_checkpoints=fitting.is_hierarchical),
        f"smoothquant added to {key}: {counted(len(layers), 'linear layer')} behind a "
        f"normalization ({names}), where a few channels are far larger than the others and one "
        "static range leaves few codes for these",
    )


def _with_smoothquant(
    document: JsonObject, key: str, *, is_for_checkpoints: bool
) -> JsonObject:
    """Return the document with SmoothQuant before the other algorithms of a key.

    Checkpoints have no place for operators that it would insert.
    """
    changed = copy.deepcopy(document)
    entry: JsonObject = dict(_SMOOTHQUANT)
    if is_for_checkpoints:
        entry["online"] = False
    others = changed.get(key) or []
    if isinstance(others, dict):
        others = [others]
    changed[key] = [entry, *others]
    if not others and key != "algorithms":
        changed[key] = entry
    return changed


def _input_spec(plan: Plan, layer: str) -> QuantizationSpec | None:
    """Return how the value that a layer reads is quantized: at the layer, or where it is
    made.
    """
    tensors = plan.tensors
    tensor = tensors.get((layer, "input"))
    node = plan.graph.by_name[layer]
    while tensor is None:
        source = plan.graph.source(node)
        if source is None:
            return None
        tensor = tensors.get((source.name, "activation"))
        if tensor is None and source.row.kind != "passthrough":
            return None
        node = source
    return tensor.spec


def _has_one_static_scale(spec: QuantizationSpec) -> bool:
    is_static = spec.is_scaled and not spec.is_dynamic
    return is_static and spec.qscheme == "per_tensor" and bits_of(spec) <= _SMOOTHED_BITS


def _can_smooth(structure: Structure, layers: list[str]) -> bool:
    """Return whether SmoothQuant can rescale what one of the layers reads."""
    for group in structure.groups:
        if _can_rescale(group) and not set(group.layers).isdisjoint(layers):
            return True
    return False


def _can_rescale(group: InputGroup) -> bool:
    return not group.tied and not group.is_fixed


def leave_out_idle_algorithms(fitting: Fitting) -> None:
    """Leave out algorithms without a layer to change, with names that are not in the model, or
    that would round one weight several times.
    """
    # From the last, as an index counts those before it
    for algorithm in reversed(fitting.config.algorithms):
        reason = why_algorithm_is_idle(algorithm, fitting.plan)
        shared = [] if reason is not None else rounded_apart(algorithm, fitting.plan)
        if shared:
            names = first_names(fitting.names(shared), 2)
            reason = f"it would round the weights of {names} for each call on its own"
        if reason is not None:
            sentence = f"{algorithm.name} left out of {algorithm.path[0]}: {reason}"
            fitting.remove(algorithm.path, sentence)


def rounded_apart(algorithm: Algorithm, plan: Plan) -> list[str]:
    """Return the layers whose weight another call has, too, and which an algorithm would round
    for each call on its own.
    """
    layers: list[str] = []
    if algorithm.stage != "round":
        return layers
    for group in find_structure(plan.graph, algorithm.names).groups:
        for layer in group.tied:
            node = plan.graph.by_name[layer]
            if node.is_multiplying and (layer, "weights") in plan.tensors:
                layers.append(layer)
    return layers


def why_algorithm_is_idle(algorithm: Algorithm, plan: Plan) -> str | None:
    """Return why an algorithm does nothing for the model, or cannot run; None if it can."""
    try:
        structure = find_structure(plan.graph, algorithm.names)
    except ConfigError as error:
        return error.diagnostics[0].message
    for group in structure.groups:
        if algorithm.kind.eases_activations and not _can_rescale(group):
            continue
        for layer in group.layers:
            weights = plan.tensors.get((layer, "weights"))
            if weights is not None and _may_change(algorithm, weights.spec):
                return None
            if algorithm.kind.eases_activations and _input_spec(plan, layer):
                return None
    return "the model has no linear or convolution layer that it may change"


def _may_change(algorithm: Algorithm, spec: QuantizationSpec) -> bool:
    is_searched = spec.scale_type == "superblock"
    return spec.is_scaled and not (is_searched and keeps_super_blocks(algorithm.kind))
