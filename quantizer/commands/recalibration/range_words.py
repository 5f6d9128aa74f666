"""Change the range methods of activations in a config's document, in the file's own form."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantizer.config.document.document import Document
from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical_spec import observer_word, specification
from quantizer.config.forms.layered import FIELDS
from quantizer.config.forms.level_edits import specified, with_entries
from quantizer.config.json_types import JsonMapping, JsonObject, JsonPath
from quantizer.config.model import QuantizationSpec, Role
from quantizer.config.roles import KEY_OF, base_role

_RANGE_FIELDS = ("method", "percentage", "statistic")
"""The fields of a spec that decide how a range is found."""
_TensorKey = tuple[str, str]
"""A layer and a role."""
_FieldKey = tuple[str, str | None, str | None]
"""A layer, a role and a field of its spec; None for all."""
Paths = Mapping[_FieldKey, JsonPath | None]
"""Where the document states something; None where it does not."""
_WORDS = {field: word for word, field in FIELDS.items()}
_LEVEL_DEPTHS = {
    "layer_quantize_config": 2,
    "global_quant_config": 1,
    "layer_type_quant_config": 2,
    "layer_quant_config": 2,
}
"""How many parts of a path lead to a level of the file, by the first part; other paths are at
the top.
"""


@dataclass(frozen=True)
class SpecChange:
    """A tensor's spec before and after, and where each of its fields came from."""

    before: QuantizationSpec
    after: QuantizationSpec
    origins: Mapping[str, str]

    @property
    def changes(self) -> list[str]:
        """Return the fields that differ."""
        before = self.before.to_json()
        after = self.after.to_json()
        return [field for field in _RANGE_FIELDS if before[field] != after[field]]


def in_place(
    document: Document,
    changed: Mapping[_TensorKey, SpecChange],
    others: Iterable[tuple[str, Mapping[str, str]]],
) -> tuple[JsonObject, Paths] | None:
    """Return the document with the new words at the levels that state the old ones, and the
    path of each new word.

    Return None where such a level also decides activations that stay as they are: `others`,
    their roles and origins.
    """
    levels: dict[tuple[str, str, str], JsonPath] = {}
    changed_levels: set[tuple[Role, JsonPath | None]] = set()
    for (layer, role), tensor in changed.items():
        for field in tensor.changes:
            level = _level(document, tensor, field)
            levels[layer, role, field] = level
            changed_levels.add((base_role(role), level))
    for role, origins in others:
        for field in _RANGE_FIELDS:
            other_level = _level_of(document, origins.get(field, ""))
            if (base_role(role), other_level) in changed_levels:
                return None
    value = copy.deepcopy(dict(document.value))
    paths: dict[_FieldKey, JsonPath | None] = {}
    is_layered = form_of(document.value) == "layered"
    for (layer, role, field), level in levels.items():
        after = changed[layer, role].after
        if is_layered:
            path = (*level, "tensor_quantize_config", base_role(role), _WORDS[field])
            _set(value, path, getattr(after, field))
            paths[layer, role, field] = path
        else:
            block = (*level, KEY_OF[base_role(role)])
            paths[layer, role, "percentage"] = _write_observer(value, block, after)
            if field != "percentage":
                paths[layer, role, field] = (*block, "observer_cls")
    return value, paths


def _write_observer(value: Any, block: JsonPath, spec: QuantizationSpec) -> JsonPath | None:
    """Write a spec's range method into a block, and return the path of its percentage."""
    _set(value, (*block, "observer_cls"), observer_word(spec))
    path = (*block, "percentage")
    if spec.method != "percentile":
        _set(value, path, None)
        return None
    _set(value, path, spec.percentage)
    return path


def by_layer(
    document: JsonMapping,
    layers: Mapping[str, Mapping[Role, QuantizationSpec]],
    changed: Mapping[_TensorKey, SpecChange],
) -> tuple[JsonObject, Paths]:
    """Return the document with an entry of its own for each of `layers`, which has the specs of
    all its tensors, and the path of each new word.
    """
    if form_of(document) == "layered":
        return _layered_entries(document, layers)
    paths: dict[_FieldKey, JsonPath | None] = {}
    value = copy.deepcopy(dict(document))
    named = value.setdefault("layer_quant_config", {})
    for (layer, role), tensor in changed.items():
        # Of equally specific entries the last one holds, so it is moved to the end
        level = named.pop(layer, {})
        key = KEY_OF[base_role(role)]
        level[key] = {**(level.get(key) or {}), **specification(tensor.after)}
        named[layer] = level
        paths[layer, role, None] = ("layer_quant_config", layer, key)
    return value, paths


def _layered_entries(
    document: JsonMapping, layers: Mapping[str, Mapping[Role, QuantizationSpec]]
) -> tuple[JsonObject, Paths]:
    """Return a document with entries for layers, and where the fields of their specs are."""
    paths: dict[_FieldKey, JsonPath | None] = {}
    entries = {name: specified(document, specs) for name, specs in layers.items()}
    value = with_entries(document, entries)
    first = len(value["layer_quantize_config"]) - len(entries)
    for index, (name, entry) in enumerate(entries.items(), first):
        path = ("layer_quantize_config", index)
        for role in layers[name]:
            for word, field in FIELDS.items():
                if word in entry["tensor_quantize_config"].get(role, {}):
                    block: JsonPath = (*path, "tensor_quantize_config", role)
                elif word in entry["overall_quantize_config"]:
                    block = (*path, "overall_quantize_config")
                else:
                    continue
                paths[name, role, field] = (*block, word)
    return value, paths


def _level(document: Document, tensor: SpecChange, field: str) -> JsonPath:
    """Return the level that states a field, or where none does, the method or the dtype; the
    top if all is by default.
    """
    for name in (field, "method", "dtype"):
        level = _level_of(document, tensor.origins.get(name, ""))
        if level is not None:
            return level
    return ()


def _level_of(document: Document, origin: str) -> JsonPath | None:
    path = document.paths_at.get(origin)
    if not path:
        return path
    depth = _LEVEL_DEPTHS.get(str(path[0]), 0)
    return path[:depth]


def _set(value: Any, path: JsonPath, word: Any) -> None:
    """Write a word at a path, or with None remove it."""
    *before, last = path
    for part in before:
        value = value[part] if isinstance(part, int) else value.setdefault(part, {})
    if word is None:
        value.pop(last, None)
    else:
        value[last] = word
