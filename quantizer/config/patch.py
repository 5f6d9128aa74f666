"""A config file's document with other widths for the weights of single layers, in the file's own form. No tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from quantizer.config.form import is_hierarchical
from quantizer.config.layered import FIELDS
from quantizer.config.model import CAST_ONLY, ROLES, QuantizationSpec, Role
from quantizer.config.spec_words import INTEGERS
from quantizer.errors import UsageError

Specs = Mapping[Role, QuantizationSpec]


def patched(document: Mapping[str, Any], layers: Mapping[str, Specs]) -> dict[str, Any]:
    """The document with an entry for each of `layers`, which maps a layer's name to the specs of all its tensors that
    are quantized, that of "weights" as it shall be.

    The layered form needs complete entries, so there the other tensors are said again; in the hierarchical form an
    entry says the weights' dtype alone. Comments ("//" keys) stay.

    Raises:
        UsageError: the form has no word for a width.
    """
    changed = copy.deepcopy(dict(document))
    if not layers:
        return changed
    if is_hierarchical(document):
        named = changed.setdefault("layer_quant_config", {})
        for name, specs in layers.items():
            entry = named.pop(name, {})  # and to the end: of equally specific entries the last one holds
            named[name] = {**entry, "weight": _weight(entry.get("weight") or {}, specs["weights"])}
        return changed
    entries = changed.get("layer_quantize_config") or []
    old = {entry.get("layer_name"): entry for entry in entries}
    others = [entry for entry in entries if entry.get("layer_name") not in layers]
    changed["layer_quantize_config"] = [
        *others,
        *(_comments(old.get(name, {})) | _entry(name, specs) for name, specs in layers.items()),
    ]
    return changed


def _weight(own: Mapping[str, Any], spec: QuantizationSpec) -> dict[str, Any]:
    """What a level says of a weight already, with another dtype."""
    if spec.dtype in CAST_ONLY:
        return {"dtype": spec.dtype}
    return {**own, "dtype": _dtype(spec), "symmetric": spec.symmetric}


def _dtype(spec: QuantizationSpec) -> str:
    """The word for an integer grid; codes from 0 on have the unsigned one, where there is one."""
    signed = spec.signed and spec.symmetric
    words = [f"int{spec.bit_width}"] if signed else [f"uint{spec.bit_width}"]
    words += [f"int{spec.bit_width}"] if not spec.symmetric else []
    word = next((word for word in words if word in INTEGERS), None)
    if word is None:
        known = ", ".join(INTEGERS)
        raise UsageError(f"the hierarchical form has no dtype {words[0]}", help=f"it has {known}: change --choices")
    return word


def _comments(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key.startswith("//")}


def _entry(name: str, specs: Specs) -> dict[str, Any]:
    """A complete entry of the layered form. Its overall block is about integers, as a format without a scale has no
    other keys."""
    integers = [spec for spec in specs.values() if spec.dtype == "int"]
    overall = _parameters(integers[0] if integers else QuantizationSpec()) | {"per_channel": False}
    overall.pop("percentage", None)  # the tensors that have one say so themselves
    tensors = {role: _differing(_parameters(specs[role]), overall) for role in ROLES if role in specs}
    return {
        "layer_type": None,
        "layer_name": name,
        "quantizable_data_type": [role for role in ROLES if role in specs],
        "overall_quantize_config": overall,
        "tensor_quantize_config": {role: block for role, block in tensors.items() if block},
    }


def _differing(block: Mapping[str, Any], overall: Mapping[str, Any]) -> dict[str, Any]:
    return {word: value for word, value in block.items() if overall.get(word) != value}


def _parameters(spec: QuantizationSpec) -> dict[str, Any]:
    """All that a spec says, in the layered form's words."""
    if spec.dtype in CAST_ONLY:
        return {"datatype": spec.dtype}
    values = {**spec.to_json(), "qscheme": spec.qscheme == "per_channel"}
    idle = () if spec.method == "percentile" else ("percentage",)
    return {word: values[field] for word, field in FIELDS.items() if word not in idle}
