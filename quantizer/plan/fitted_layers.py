"""Fit a config to single layers of a model: those that few bits spoil most, and heads whose
channels are outputs of different ranges.
"""

from dataclasses import replace

from quantizer.config.document.document import value_at
from quantizer.config.forms.layer_entries import specified, with_entries
from quantizer.config.json_types import JsonObject
from quantizer.config.model import ROLES, QuantizationSpec, Role
from quantizer.config.roles import base_role
from quantizer.config.wording import first_names
from quantizer.numerics.codes import bits_of
from quantizer.plan.fitting import Fitting, eight_bits
from quantizer.plan.sensitive_layers import sensitive_layers

_FEW_BITS = 4
_HEAD = "kind:head"


def spare_sensitive_layers(fitting: Fitting) -> None:
    """Leave embeddings, routers and heads in float where they would have few bits, as long as
    other layers have few bits.
    """
    coarse = _coarse_layers(fitting)
    if not coarse and not fitting.plan.tensors:
        _quantize_only_layer(fitting)
        return
    sensitive = sensitive_layers(fitting.graph)
    routers = [name for name in coarse if name in sensitive.routers]
    heads = [name for name in coarse if name in sensitive.heads]
    layers_by_reason = {
        "an error in a row of an embedding is averaged with no other": _embeddings(
            fitting, coarse
        ),
        "the largest outputs choose what is computed or returned, and few bits would choose "
        "otherwise": routers,
        "few bits lose most where outputs are made": heads,
    }
    spared: set[str] = set()
    for reason, layers in layers_by_reason.items():
        added = [name for name in layers if name not in spared]
        remaining = coarse.keys() - spared - set(added)
        if not added or not remaining:
            continue
        spared.update(added)
        names = fitting.names(added, kinds=True)
        fitting.leave_float(names, f"{first_names(names)} left in float: {reason}")


def _coarse_layers(fitting: Fitting) -> dict[str, QuantizationSpec]:
    """Return the layers whose weights have few bits, with a spec of theirs."""
    layers: dict[str, QuantizationSpec] = {}
    for (layer, role), tensor in fitting.plan.tensors.items():
        if base_role(role) == "weights" and _has_few_bits(tensor.spec):
            layers.setdefault(layer, tensor.spec)
    return layers


def _has_few_bits(spec: QuantizationSpec) -> bool:
    return spec.is_scaled and bits_of(spec) <= _FEW_BITS


def _embeddings(fitting: Fitting, coarse: dict[str, QuantizationSpec]) -> list[str]:
    """Return the embeddings with few bits, and with them those that groups do not fit yet: the
    size of groups may still change.
    """
    by_name = fitting.graph.by_name
    embeddings = [name for name in coarse if by_name[name].row.looks_up]
    if embeddings:
        for name, _ in fitting.plan.ungrouped:
            if by_name[name].row.looks_up:
                embeddings.append(name)
    return embeddings


def _quantize_only_layer(fitting: Fitting) -> None:
    """Quantize the head after all, if it is the only layer with a weight to multiply."""
    excluded = fitting.document.get("exclude") or []
    multiplying = [node for node in fitting.graph.nodes if node.is_multiplying]
    if _HEAD not in excluded or len(multiplying) != 1:
        return
    path = ("exclude", excluded.index(_HEAD))
    sentence = f"{_HEAD} left out of exclude: it is the only layer that multiplies"
    fitting.remove(path, sentence)


def give_recurrent_layers_eight_bits(fitting: Fitting) -> None:
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
    sentence = (
        f"int8 for {first_names(names)}: errors of recurrent layers add up from step to step"
    )
    fitting.give_weights(names, eight_bits(spec), sentence)
    words = _words_of_coarse_inputs(fitting, layers)
    if words:
        fitting.give_inputs(names, {**words, "dtype": "int8"})


def _words_of_coarse_inputs(
    fitting: Fitting, layers: dict[str, QuantizationSpec]
) -> JsonObject:
    """Return what the document states of the inputs of some layers, if these have few bits."""
    for tensor in fitting.plan.tensors.values():
        if tensor.layer not in layers or base_role(tensor.role) != "input":
            continue
        path = fitting.path_of(tensor, "dtype")
        if path is not None and _has_few_bits(tensor.spec):
            words: JsonObject = value_at(fitting.document, path[:-1])
            return words
    return {}


def give_divided_heads_channels(fitting: Fitting) -> None:
    """Give heads a scale for each output channel in the layered form, where one scale for all
    weights would serve outputs of different ranges.
    """
    if fitting.is_hierarchical or fitting.is_for_dpu:
        return
    entries: dict[str, JsonObject] = {}
    for layer in sensitive_layers(fitting.graph).divided:
        specs: dict[Role, QuantizationSpec] = {}
        for role in ROLES:
            tensor = fitting.plan.of_layer(layer).get(role)
            if tensor is not None:
                specs[role] = tensor.spec
        weights = specs.get("weights")
        if weights is None or weights.dtype != "int":
            continue
        if weights.qscheme == "per_tensor":
            specs["weights"] = replace(weights, qscheme="per_channel", group_size=None)
            entries[layer] = specified(fitting.document, specs)
    if entries:
        names = first_names(fitting.names(entries))
        fitting.change(
            with_entries(fitting.document, entries),
            f"per_channel for the weights of {names}: their channels are outputs of different "
            "ranges",
        )
