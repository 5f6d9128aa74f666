"""Add SmoothQuant to a config that is fitted to a model, where one static scale would serve the
inputs of linear layers badly.
"""

import copy

from quantizer.config.json_types import JsonObject
from quantizer.config.model import QuantizationSpec
from quantizer.config.wording import counted, first_names
from quantizer.graph.structure.definitions import Structure
from quantizer.graph.structure.find import find_structure
from quantizer.numerics.codes import bits_of
from quantizer.plan.fit.fitted_config import can_rescale, input_spec
from quantizer.plan.fit.fitted_layers import behind_norms
from quantizer.plan.fit.fitting import Fitting

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
        spec = input_spec(fitting.plan, layer)
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


def _has_one_static_scale(spec: QuantizationSpec) -> bool:
    is_static = spec.is_scaled and not spec.is_dynamic
    return is_static and spec.qscheme == "per_tensor" and bits_of(spec) <= _SMOOTHED_BITS


def _can_smooth(structure: Structure, layers: list[str]) -> bool:
    """Return whether SmoothQuant can rescale what one of the layers reads."""
    for group in structure.groups:
        if can_rescale(group) and not set(group.layers).isdisjoint(layers):
            return True
    return False
