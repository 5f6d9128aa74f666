"""A config's document with other range methods for activations, in the file's own form. Knows
no tensors.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantizer.config.document.document import Document
from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical import KEY_OF
from quantizer.config.forms.hierarchical_spec import observer_word, specification
from quantizer.config.forms.layered import FIELDS, specified, with_entries
from quantizer.config.model import QuantizationSpec, Role
from quantizer.config.roles import base_role

RANGE_FIELDS = ("method", "percentage", "statistic")
"""The fields of a spec that say how a range is found."""
Path = tuple[str | int, ...]
Key = tuple[str, str]
Field = tuple[str, str | None, str | None]
"""A layer, a role and a field of its spec; None for all."""
Paths = Mapping[Field, Path | None]
"""Where the document says something; None where it does not."""
_WORDS = {field: word for word, field in FIELDS.items()}
_LEVELS = {
    "layer_quantize_config": 2,
    "global_quant_config": 1,
    "layer_type_quant_config": 2,
    "layer_quant_config": 2,
}
"""How many steps of a path lead to a level of the file, by the first; other paths are at the
top.
"""


@dataclass(frozen=True)
class Restated:
    """A tensor before and after, and where each field of its spec came from."""

    before: QuantizationSpec
    after: QuantizationSpec
    origins: Mapping[str, str]

    @property
    def changes(self) -> list[str]:
        """The fields that differ."""
        return [
            field
            for field in RANGE_FIELDS
            if getattr(self.before, field) != getattr(self.after, field)
        ]


def in_place(
    document: Document,
    changed: Mapping[Key, Restated],
    others: Iterable[tuple[str, Mapping[str, str]]],
) -> tuple[dict[str, Any], Paths] | None:
    """The document with the new words at the levels that say the old ones, and the path of each
    new word.

    None where such a level also speaks of activations that stay as they are: `others`, their
    roles and origins.
    """
    levels = {
        (*key, field): _level(document, each, field)
        for key, each in changed.items()
        for field in each.changes
    }
    spoken = {(base_role(role), level) for (_, role, _), level in levels.items()}
    for role, origins in others:
        for field in RANGE_FIELDS:
            if (base_role(role), _level_of(document, origins.get(field, ""))) in spoken:
                return None
    value, paths = copy.deepcopy(dict(document.value)), dict[Field, Path | None]()
    is_layered = form_of(document.value) == "layered"
    for (layer, role, field), level in levels.items():
        after = changed[layer, role].after
        if is_layered:
            path: Path = (*level, "tensor_quantize_config", base_role(role), _WORDS[field])
            _set(value, path, getattr(after, field))
        else:
            block = (*level, KEY_OF[base_role(role)])
            path = (*block, "observer_cls")
            _set(value, path, observer_word(after))
            _set(
                value,
                (*block, "percentage"),
                after.percentage if after.method == "percentile" else None,
            )
            paths[layer, role, "percentage"] = (
                (*block, "percentage") if after.method == "percentile" else None
            )
        if is_layered or field != "percentage":
            paths[layer, role, field] = path
    return value, paths


def by_layer(
    document: Mapping[str, Any],
    layers: Mapping[str, Mapping[Role, QuantizationSpec]],
    changed: Mapping[Key, Restated],
) -> tuple[dict[str, Any], Paths]:
    """The document with an entry of its own for each of `layers`, which has the specs of all
    its tensors.
    """
    paths = dict[Field, Path | None]()
    if form_of(document) == "layered":
        said = {name: specified(document, specs) for name, specs in layers.items()}
        value = with_entries(document, said)
        first = len(value["layer_quantize_config"]) - len(said)
        for at, (name, complete) in enumerate(said.items(), first):
            for role in layers[name]:
                own = complete["tensor_quantize_config"].get(role, {})
                for word, field in FIELDS.items():
                    block = (
                        ("tensor_quantize_config", role)
                        if word in own
                        else ("overall_quantize_config",)
                    )
                    if word in own or word in complete["overall_quantize_config"]:
                        paths[name, role, field] = ("layer_quantize_config", at, *block, word)
        return value, paths
    value = copy.deepcopy(dict(document))
    named = value.setdefault("layer_quant_config", {})
    for (layer, tensor), each in changed.items():
        # And to the end: of equally specific entries the last one holds
        own = named.pop(layer, {})
        key = KEY_OF[base_role(tensor)]
        named[layer] = {**own, key: {**(own.get(key) or {}), **specification(each.after)}}
        paths[layer, tensor, None] = ("layer_quant_config", layer, key)
    return value, paths


def _level(document: Document, tensor: Restated, field: str) -> Path:
    """The level that says a field, or where none does, the method; the top if all is by
    default.
    """
    found = (
        _level_of(document, tensor.origins.get(name, "")) for name in (field, "method", "dtype")
    )
    return next((level for level in found if level is not None), ())


def _level_of(document: Document, origin: str) -> Path | None:
    path = document.paths_at.get(origin)
    return None if path is None else path[: _LEVELS.get(str(path[0]), 0)] if path else ()


def _set(value: Any, path: Path, word: Any) -> None:
    """Write a word at a path, or with None take it away."""
    *before, last = path
    for part in before:
        value = value[part] if isinstance(part, int) else value.setdefault(part, {})
    if word is None:
        value.pop(last, None)
    else:
        value[last] = word
