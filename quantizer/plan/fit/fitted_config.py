"""Fit a config to a traced model, so that calibration accepts it and the layers that lose most
are spared.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from quantizer.config.algorithms import Algorithm, keeps_super_blocks
from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document, Text
from quantizer.config.document.edited import edited_text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.aliases import canonical
from quantizer.config.json_types import JsonMapping, JsonObject, JsonPath
from quantizer.config.load import check_document, load_text
from quantizer.config.model import QuantizationSpec
from quantizer.config.wording import first_names
from quantizer.declarations import FIT_INPUTS
from quantizer.errors import UsageError, or_without
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.definitions import InputGroup
from quantizer.graph.structure.find import find_structure
from quantizer.plan.fit.fitted_groups import (
    fit_axes,
    fit_groups,
    leave_out_impossible,
    replace_super_blocks,
)
from quantizer.plan.fit.fitted_layers import (
    give_divided_heads_channels,
    give_recurrent_layers_eight_bits,
    spare_sensitive_layers,
)
from quantizer.plan.fit.fitting import Fitting
from quantizer.plan.match import match
from quantizer.plan.model import Plan
from quantizer.plan.remarks import group_size_remarks
from quantizer.plan.selected import SELECTED_KINDS
from quantizer.plugins import if_command, part

LayersToLeave = Callable[[Plan], Mapping[str, str]]
"""Returns the layers of a plan to leave in float for the file to write, with the reason."""
_ENTRIES = ("layer_quantize_config", "layer_type_quant_config", "layer_quant_config", "exclude")
"""The blocks with entries for layers, in both forms."""
_COMMENT = "//"
"""The key of a preset's own comment."""
_CHANGES_COMMENT = "// fitted to the model"
"""The key of the comment that lists the changes."""


@dataclass(frozen=True)
class FittedConfig:
    """A config's document that fits a model.

    Attributes:
        document: in the form that it had.
        changes: a sentence for each change; none if the document fits as it is.
    """

    document: JsonObject
    changes: tuple[str, ...]


def fitted_text(
    text: str, name: str, original: Graph, to_leave: LayersToLeave | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the text of a preset as it fits a model, and a sentence for each change.

    Args:
        text: of the preset.
        name: of the preset, for messages.
        original: the model as traced.
        to_leave: finds layers to leave in float for the file to write, if that is known.

    Raises:
        ConfigError, UsageError, ModelError: the preset cannot be made to fit.
    """
    document = parse_document(Text(name, text))
    fitted = fitted_document(document.value, original, name=name, to_leave=to_leave)
    changed = edited_text(document, _with_comment(fitted))
    load_text(Text(name, changed)).require()
    return changed, fitted.changes


def _with_comment(fitted: FittedConfig) -> JsonObject:
    """Return the document with its changes as a comment below its own one, which is about the
    preset.
    """
    if not fitted.changes:
        return fitted.document
    commented: JsonObject = {}
    for key, value in fitted.document.items():
        commented[key] = value
        if key == _COMMENT:
            commented[_CHANGES_COMMENT] = list(fitted.changes)
    return commented


def fitted_document(
    document: JsonMapping,
    original: Graph,
    *,
    name: str = "config",
    to_leave: LayersToLeave | None = None,
) -> FittedConfig:
    """Return a config's document, changed where the model asks for it.

    Calibration accepts the result for this model, and quantizes something.

    Args:
        document: of either form, such as that of a preset; it is not changed itself.
        original: the model as traced.
        name: of the config, for messages.
        to_leave: finds layers to leave in float for the file to write.

    Raises:
        ConfigError: the document is wrong, or contradicts itself where it applies to the model.
        UsageError: nothing of the model would be quantized.
        ModelError: a layer has no name that a config can say.
    """
    parsed = Document.of(document, name)
    config = check_document(parsed).require()
    graph = run_passes(original, config.settings)
    if config.form == "hierarchical":
        # Steps know the form's own words only
        parsed, _ = canonical(parsed)
    changed = copy.deepcopy(dict(parsed.value))
    fitting = Fitting(changed, name, graph, original)
    if to_leave is not None:
        _fit_file(fitting, to_leave)
    for step in _STEPS:
        if step in _IMPROVEMENTS:
            what = f"the step {step.__name__} of fitting {name}"
            fitting = or_without(what, partial(_stepped, fitting, step), fitting)
        else:
            step(fitting)
    _require_accepted(fitting)
    if not fitting.changes:
        return FittedConfig(copy.deepcopy(dict(document)), ())
    return FittedConfig(fitting.document, tuple(fitting.changes))


def _stepped(fitting: Fitting, step: Callable[[Fitting], None]) -> Fitting:
    """Return what a step makes of a fitting, which stays as it is."""
    changed = fitting.copied()
    step(changed)
    return changed


def _fit_file(fitting: Fitting, to_leave: LayersToLeave) -> None:
    """Leave layers in float whose rounded weights the file to write gains nothing by."""
    layers_by_reason: dict[str, list[str]] = {}
    for layer, reason in to_leave(fitting.plan).items():
        layers_by_reason.setdefault(reason, []).append(layer)
    for reason, layers in layers_by_reason.items():
        names = fitting.names(layers, kinds=True)
        fitting.leave_float(names, f"{first_names(names)} left in float: {reason}")


def _leave_out_unmatched(fitting: Fitting) -> None:
    """Leave out entries for types and names of layers that the model does not have."""
    unmatched: dict[JsonPath, str] = {}
    for rule in fitting.config.rules:
        selector = rule.selector
        if selector.kind not in ("type", "name", "exclude") or not selector.required:
            continue
        result = match(selector, fitting.graph, fitting.original)
        if result.layers or selector.text in SELECTED_KINDS:
            continue
        reason = f"the model has no layer {selector.text}"
        if result.absorbed:
            reason = f"all layers {selector.text} are folded into others"
        path = fitting.parsed.paths_at[str(selector.place)]
        unmatched[path[:2]] = f"{rule.label} left out: {reason}"
    # From the last, as the removal of an entry changes the indices of later ones
    for path, sentence in reversed(unmatched.items()):
        fitting.remove(path, sentence)


def _require_layers(fitting: Fitting) -> None:
    """Raise `UsageError` if a config only quantizes layers with weights, and there are none."""
    for rule in fitting.config.rules:
        if rule.selector.kind != "weighted" or not rule.fields:
            continue
        result = match(rule.selector, fitting.graph, fitting.original)
        if not result.layers:
            raise UsageError(
                f"{fitting.name} quantizes layers with weights, and {fitting.original.model} "
                "has none",
                help="choose a config that quantizes activations, such as cpu_int8",
            )


def _fit_inputs(fitting: Fitting) -> None:
    """Add the algorithm of a plug-in that serves inputs of linear layers, if there is one."""
    fit = part(FIT_INPUTS)
    if fit is not None:
        fit(fitting)


def _leave_out_idle_entries(fitting: Fitting) -> None:
    """Leave out entries for layers that are now all in float."""
    idle: dict[JsonPath, str] = {}
    for rule in fitting.plan.rules:
        path = fitting.parsed.paths_at.get(rule.place, ())
        is_entry = path[:1] and path[0] in _ENTRIES
        if is_entry and rule.layers and not rule.took_effect:
            idle[path[:2]] = rule.label
    # From the last, as the removal of an entry changes the indices of later ones
    for path, label in reversed(idle.items()):
        fitting.remove_idle(path, label)


def _require_accepted(fitting: Fitting) -> None:
    """Raise an error if calibration would refuse the config, or if it quantizes nothing."""
    if fitting.errors:
        raise ConfigError(fitting.errors)
    if fitting.plan.tensors:
        return
    reasons = "; ".join([*group_size_remarks(fitting.plan), *fitting.changes])
    if not reasons:
        reasons = "the config leaves all of its layers in float"
    raise UsageError(
        f"{fitting.name} does not fit {fitting.original.model}, of which nothing would be "
        f"quantized: {reasons}",
        help="choose another preset"
        + if_command("init", ": `quantizer init --list` says when to use each"),
    )


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


_STEPS = (
    _leave_out_unmatched,
    _require_layers,
    fit_axes,
    spare_sensitive_layers,
    give_recurrent_layers_eight_bits,
    replace_super_blocks,
    fit_groups,
    leave_out_impossible,
    _fit_inputs,
    give_divided_heads_channels,
    leave_out_idle_algorithms,
    _leave_out_idle_entries,
)
_IMPROVEMENTS = (spare_sensitive_layers, _fit_inputs, give_divided_heads_channels)
"""The steps without which calibration accepts the config, too."""
