"""Leave out the algorithms of a config that have no layer of a model to change."""

from quantizer.config.algorithms import keeps_super_blocks
from quantizer.config.diagnostics import ConfigError
from quantizer.config.model import Algorithm, QuantizationSpec
from quantizer.config.wording import first_names
from quantizer.graph.structure.definitions import InputGroup
from quantizer.graph.structure.find import find_structure
from quantizer.plan.fit.fitting import Fitting
from quantizer.plan.model import Plan


def input_spec(plan: Plan, layer: str) -> QuantizationSpec | None:
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


def can_rescale(group: InputGroup) -> bool:
    """Return whether an algorithm can rescale the channels that a group reads."""
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
        if algorithm.kind.eases_activations and not can_rescale(group):
            continue
        for layer in group.layers:
            weights = plan.tensors.get((layer, "weights"))
            if weights is not None and _may_change(algorithm, weights.spec):
                return None
            if algorithm.kind.eases_activations and input_spec(plan, layer):
                return None
    return "the model has no linear or convolution layer that it may change"


def _may_change(algorithm: Algorithm, spec: QuantizationSpec) -> bool:
    is_searched = spec.scale_type == "superblock"
    return spec.is_scaled and not (is_searched and keeps_super_blocks(algorithm.kind))
