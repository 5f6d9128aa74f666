"""Fit a config to a traced model, so that calibration accepts it and the layers that lose most
are spared.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document, value_at
from quantizer.config.forms.layered import specified, with_entries
from quantizer.config.json_types import JsonMapping, JsonObject, JsonPath
from quantizer.config.load import check_document
from quantizer.config.model import ROLES, Algorithm, QuantizationSpec, Role, StructureNames
from quantizer.config.wording import counted, first_names, listed
from quantizer.errors import UsageError
from quantizer.graph.find_structure import find_structure
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.structure import Structure
from quantizer.numerics.codes import bits_of
from quantizer.plan.fitted_groups import (
    eight_bits,
    fit_axes,
    fit_groups,
    leave_out_impossible,
)
from quantizer.plan.fitting import Fitting
from quantizer.plan.match import match
from quantizer.plan.sensitive_layers import behind_norms, sensitive_layers

_FEW_BITS = 4
_SMOOTHED_BITS = 8
_HEAD = "kind:head"
_ALGORITHM_KEYS = ("algorithms", "algo_config", "pre_quant_opt_config")
_SMOOTHQUANT = {"name": "smoothquant", "alpha": 0.5, "scale_clamp_min": 0.001}
"""The entry of the preset smoothquant_int8."""


@dataclass(frozen=True)
class FittedConfig:
    """A config's document that fits a model, and a sentence for each change."""

    document: JsonObject
    changes: tuple[str, ...]


def fitted_document(
    document: JsonMapping, original: Graph, *, name: str = "config"
) -> FittedConfig:
    """Return a config's document as it fits a traced model.

    The document is changed only where the model asks for it. Calibration accepts the result for
    this model.

    Args:
        document: of either form, such as that of a preset.
        original: the model as traced.
        name: of the config, for messages.

    Raises:
        ConfigError: the document itself is wrong, or nothing that this function knows makes it
            fit.
        UsageError: nothing of the model would be quantized.
    """
    parsed = Document.of(document, name)
    config = check_document(parsed).require()
    graph = run_passes(original, config.settings)
    fitting = Fitting(copy.deepcopy(dict(document)), name, graph, original)
    for step in _STEPS:
        step(fitting)
    _require_accepted(fitting)
    return FittedConfig(fitting.document, tuple(fitting.changes))


def _leave_out_unmatched(fitting: Fitting) -> None:
    """Leave out entries for types and names of layers that the model does not have."""
    unmatched: dict[JsonPath, str] = {}
    for rule in fitting.config.rules:
        selector = rule.selector
        if selector.kind not in ("type", "name", "exclude") or not selector.required:
            continue
        found_match = match(selector, fitting.graph, fitting.original)
        if found_match.layers or selector.text.startswith("kind:"):
            continue
        reason = f"the model has no layer {selector.text}"
        if found_match.absorbed:
            reason = f"all layers {selector.text} are folded into others"
        path = fitting.parsed.paths_at[str(selector.place)]
        unmatched[path[:2]] = f"{rule.label} left out: {reason}"
    # From the last, as an index counts those before it
    for path, sentence in reversed(unmatched.items()):
        fitting.remove(path, sentence)


def _require_layers(fitting: Fitting) -> None:
    """Refuse a config that quantizes only layers with weights, for a model without any."""
    for rule in fitting.config.rules:
        is_weighted = rule.selector.kind == "weighted" and rule.fields
        if is_weighted and not match(rule.selector, fitting.graph, fitting.original).layers:
            raise UsageError(
                f"{fitting.name} quantizes layers with weights, and {fitting.original.model} "
                "has none",
                help="choose a config that quantizes activations, such as cpu_int8",
            )


def _spare_sensitive_layers(fitting: Fitting) -> None:
    """Leave in float what few bits spoil most, as long as other layers are quantized in few
    bits: embeddings, routers and heads.
    """
    graph = fitting.graph
    coarse = _coarse_layers(fitting)
    if not coarse and not fitting.plan.tensors:
        _quantize_only_layer(fitting)
        return
    sensitive = sensitive_layers(graph)
    embeddings = [name for name in coarse if graph.by_name[name].row.looks_up]
    if embeddings:
        # Groups of the size that the layers get may fit them
        for name, _ in fitting.plan.ungrouped:
            if graph.by_name[name].row.looks_up:
                embeddings.append(name)
    reasons = {
        "an error in a row of an embedding is averaged with no other": embeddings,
        "its largest outputs choose what is computed or returned, and few bits would choose "
        "otherwise": [name for name in coarse if name in sensitive.routers],
        "few bits lose most where outputs are made": [
            name for name in coarse if name in sensitive.heads
        ],
    }
    remaining = set(coarse)
    for reason, layers in reasons.items():
        spared = [name for name in layers if name in remaining or name not in coarse]
        if not spared or remaining <= set(spared):
            continue
        remaining -= set(spared)
        names = fitting.names(spared, kinds=True)
        fitting.leave_float(names, f"{listed(names)} left in float: {reason}")


def _coarse_layers(fitting: Fitting) -> dict[str, QuantizationSpec]:
    """Return the layers whose weights have few bits, with a spec of theirs."""
    layers: dict[str, QuantizationSpec] = {}
    for (layer, role), tensor in fitting.plan.tensors.items():
        spec = tensor.spec
        if role.startswith("weights") and spec.is_scaled and bits_of(spec) <= _FEW_BITS:
            layers.setdefault(layer, spec)
    return layers


def _quantize_only_layer(fitting: Fitting) -> None:
    """Quantize the head after all, if it is the only layer with a weight to multiply."""
    excluded = fitting.document.get("exclude", [])
    multiplying = [node for node in fitting.graph.nodes if node.is_multiplying]
    if _HEAD in excluded and len(multiplying) == 1:
        index = excluded.index(_HEAD)
        fitting.remove(
            ("exclude", index),
            f"{_HEAD} left out of exclude: it is the only layer that multiplies",
        )


def _give_recurrent_layers_eight_bits(fitting: Fitting) -> None:
    """Give recurrent layers 8 bits where they would have few: their errors add up from step to
    step, and no algorithm finds better codes for them.
    """
    if not fitting.is_hierarchical:
        return
    layers: dict[str, QuantizationSpec] = {}
    for layer, spec in _coarse_layers(fitting).items():
        row = fitting.graph.by_name[layer].row
        is_recurrent = row.kind == "mac" and row.channels is None
        if is_recurrent and spec.dtype == "int":
            layers[layer] = spec
    if not layers:
        return
    names = fitting.names(layers)
    spec = next(iter(layers.values()))
    sentence = f"int8 for {listed(names)}: errors of recurrent layers add up from step to step"
    fitting.give_weights(names, eight_bits(spec), sentence)
    for tensor in list(fitting.plan.tensors.values()):
        path = fitting.path_of(tensor, "dtype")
        is_input = tensor.layer in layers and tensor.role == "input"
        if is_input and path is not None and bits_of(tensor.spec) <= _FEW_BITS:
            spec_words = value_at(fitting.document, path[:-1])
            fitting.give_inputs(names, {**spec_words, "dtype": "int8"})
            return


def _smooth_normalized_inputs(fitting: Fitting) -> None:
    """Add SmoothQuant where linear layers read a normalization through one static scale."""
    algorithms = fitting.config.algorithms
    is_rescaled = any(algorithm.stage == "rescale" for algorithm in algorithms)
    if fitting.is_for_dpu or is_rescaled:
        return
    layers = []
    for layer in behind_norms(fitting.graph):
        spec = _input_spec(fitting, layer)
        if spec is not None and _has_one_static_scale(spec):
            layers.append(layer)
    structure = find_structure(fitting.graph)
    if not layers or not _can_smooth(structure, layers):
        return
    document = copy.deepcopy(fitting.document)
    key = "pre_quant_opt_config" if fitting.is_hierarchical else "algorithms"
    entry: Any = dict(_SMOOTHQUANT)
    others = document.get(key)
    if isinstance(others, list):
        entry = [entry, *others]
    elif isinstance(others, dict):
        entry = [entry, others]
    elif not fitting.is_hierarchical:
        entry = [entry]
    document[key] = entry
    names = first_names(fitting.names(layers), 3)
    fitting.change(
        document,
        f"{key} smoothquant: {counted(len(layers), 'linear layer')} behind a normalization "
        f"({names}), where a few channels are far larger than the others and one static range "
        "leaves few codes for these",
    )


def _input_spec(fitting: Fitting, layer: str) -> QuantizationSpec | None:
    """Return how the value that a layer reads is quantized: at the layer, or where it is
    made.
    """
    tensors = fitting.plan.tensors
    tensor = tensors.get((layer, "input"))
    node = fitting.graph.by_name[layer]
    while tensor is None:
        source = fitting.graph.source(node)
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
        is_free = not group.tied and not group.is_fixed
        if is_free and not set(group.layers).isdisjoint(layers):
            return True
    return False


def _give_divided_heads_channels(fitting: Fitting) -> None:
    """Give heads a scale for each output channel in the layered form, where one scale for all
    weights would serve outputs of different ranges.
    """
    if fitting.is_hierarchical or fitting.is_for_dpu:
        return
    entries: dict[str, JsonObject] = {}
    shown = []
    for layer in sensitive_layers(fitting.graph).divided:
        specs: dict[Role, QuantizationSpec] = {}
        for role, tensor in fitting.plan.of_layer(layer).items():
            if role in ROLES:
                specs[role] = tensor.spec
        weights = specs.get("weights")
        if weights is None or weights.dtype != "int" or weights.qscheme != "per_tensor":
            continue
        specs["weights"] = replace(weights, qscheme="per_channel", group_size=None)
        entries[layer] = specified(fitting.document, specs)
        shown.append(layer)
    if entries:
        names = listed(fitting.names(shown))
        fitting.change(
            with_entries(fitting.document, entries),
            f"per_channel for the weights of {names}: their channels are outputs of different "
            "ranges",
        )


def _leave_out_idle_algorithms(fitting: Fitting) -> None:
    """Leave out algorithms that find nothing to do, or that name parts which the model
    lacks.
    """
    # From the last, as an index counts those before it
    for algorithm in reversed(fitting.config.algorithms):
        reason = _why_idle(fitting, algorithm)
        if reason is None:
            continue
        sentence = f"{algorithm.label} {algorithm.name} left out: {reason}"
        fitting.remove(algorithm.path, sentence)


def _why_idle(fitting: Fitting, algorithm: Algorithm) -> str | None:
    """Return why an algorithm does nothing for the model, or cannot run; None if it can."""
    if fitting.is_for_dpu:
        return None
    structure = find_structure(fitting.graph)
    if algorithm.names != StructureNames():
        try:
            structure = find_structure(fitting.graph, algorithm.names)
        except ConfigError as error:
            return error.message
    tensors = fitting.plan.tensors
    is_smoothing = algorithm.kind.eases_activations
    for group in structure.groups:
        if is_smoothing and (group.tied or group.is_fixed):
            continue
        for layer in group.layers:
            weights = tensors.get((layer, "weights"))
            if weights is not None and weights.spec.is_scaled:
                return None
            if is_smoothing and _input_spec(fitting, layer) is not None:
                return None
    return "the model has no linear or convolution layer with weights to change"


def _require_accepted(fitting: Fitting) -> None:
    """Refuse a config that calibration would refuse, or that would quantize nothing."""
    if fitting.errors:
        raise ConfigError(fitting.errors)
    if fitting.plan.tensors:
        return
    reasons = "; ".join(fitting.changes) or "the config leaves all of its layers float"
    raise UsageError(
        f"{fitting.name} does not fit {fitting.original.model}, of which nothing would be "
        f"quantized: {reasons}",
        help="choose another preset: `quantizer init --list` says when to use each",
    )


_STEPS = (
    _leave_out_unmatched,
    _require_layers,
    fit_axes,
    _spare_sensitive_layers,
    _give_recurrent_layers_eight_bits,
    fit_groups,
    leave_out_impossible,
    _smooth_normalized_inputs,
    _give_divided_heads_channels,
    _leave_out_idle_algorithms,
)
