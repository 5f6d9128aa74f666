"""Translate the hierarchical form (global, layer type or name) into a `ResolvedConfig`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Sourced
from quantizer.config.document.document import Document
from quantizer.config.forms.form import ALGORITHM_LISTS, CACHE_BLOCK, SPEC_KEYS
from quantizer.config.forms.hierarchical_spec import Words
from quantizer.config.model import (
    ConfigRule,
    Fields,
    QuantizationSpec,
    Role,
    Selector,
    Settings,
)
from quantizer.config.roles import ROLE_OF

_WHOLE = frozenset({"ch_axis", "group_size"})
"""Keys of a spec that are whole numbers. A file may have them with a decimal point: 128.0."""

_CACHE_KEY = "output_tensors"
"""The key of a tensor whose spec, in an entry of that block, is about the cache."""

_HEAD_AXIS = 1
"""The axis of the heads in keys and values, which are [batch, heads, tokens, features]."""

_GLOBAL = "global_quant_config"
_LEVEL_KINDS: Mapping[str, Literal["type", "name"]] = {
    "layer_type_quant_config": "type",
    "layer_quant_config": "name",
}

_Specs = Mapping[Role, Fields]


@dataclass(frozen=True)
class HierarchicalLevel:
    """One `QuantizationConfig` of a file: the layers that it selects, and the specs it states.

    Attributes:
        selector: the layers.
        path: to it in the document.
        words: by role, what it states over what the global level states. The key-value cache
            inherits nothing.
    """

    selector: Selector
    path: tuple[str, ...]
    words: Mapping[Role, Words]

    def rule(self) -> ConfigRule:
        """Return the rule with all fields that this level changes in the wider one."""
        block, *names = self.path
        label = block + "".join(f'["{name}"]' for name in names)
        of_cache = self.selector.kind in ("cache", "cache_source")
        fields = {role: _fields(words, every=of_cache) for role, words in self.words.items()}
        return ConfigRule(self.selector, label, fields=fields, adds=frozenset(fields))


def translate_hierarchical(
    file: Document,
) -> tuple[Settings, list[ConfigRule], tuple[HierarchicalLevel, ...]]:
    """Translate the valid part of a document in the form's own words.

    Returns:
        The settings, the rules, and the levels of the file: the global one first, then those of
        types, names and the key-value cache. The first rule quantizes nothing, then follows one
        for each level.
    """
    levels = tuple(_levels(file))
    rules = [ConfigRule(Selector("all"), "default", roles=frozenset())]
    rules += [level.rule() for level in levels]
    return _settings(file), rules, levels


def _settings(file: Document) -> Settings:
    """Return the global settings, with the place of each."""
    device_path = (_GLOBAL, "target_device")
    stated = {
        "target_device": Sourced(file.get(*device_path) or None, file.place(*device_path))
    }
    # In reverse, so that the first entry of a switch decides its place
    for name, place in reversed(file.names(*ALGORITHM_LISTS)):
        if name in SWITCHES:
            stated[SWITCHES[name]] = Sourced(True, place)
    return Settings.of(stated)


def _levels(file: Document) -> Iterator[HierarchicalLevel]:
    """Yield the levels of the file, widest first."""
    everywhere = _specs(file, (_GLOBAL,))
    selector = Selector("weighted", place=file.place(_GLOBAL, key=True))
    yield _level(selector, (_GLOBAL,), everywhere, {})
    for block, kind in _LEVEL_KINDS.items():
        for path in _entries(file, block):
            selector = Selector(kind, path[-1], file.place(*path, key=True))
            yield _level(selector, path, _specs(file, path), everywhere)
    for path in _entries(file, CACHE_BLOCK):
        yield from _cache_levels(file, path, everywhere)


def _cache_levels(
    file: Document, path: tuple[str, ...], everywhere: _Specs
) -> Iterator[HierarchicalLevel]:
    """Yield the levels of an entry about the key-value cache: one for the keys or values that
    its layers compute. If the entry states other tensors of the layers, one for these is first.
    """
    kind: Literal["cache", "cache_source"] = "cache"
    role: Role = "input"
    if file.get("kv_cache_post_rope") is False:
        kind, role = "cache_source", "activation"
    place = file.place(*path, key=True)
    specs = _specs(file, path)
    cached = specs.pop(ROLE_OF[_CACHE_KEY], None)
    if specs:
        yield _level(Selector("name", path[-1], place), path, specs, everywhere)
    if cached:
        specs = {role: _with_axis_of_heads(role, cached)}
        yield _level(Selector(kind, path[-1], place), path, specs, {})


def _level(
    selector: Selector, path: tuple[str, ...], specs: _Specs, everywhere: _Specs
) -> HierarchicalLevel:
    words: dict[Role, Words] = {}
    for role, stated in specs.items():
        words[role] = Words(role, stated).over(Words(role, everywhere.get(role, {})))
    return HierarchicalLevel(selector, path, words)


def _entries(file: Document, block: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the entries of a block, without comments."""
    members = file.get(block)
    for text in members if isinstance(members, dict) else ():
        if not text.startswith("//") and isinstance(file.get(block, text), dict):
            yield block, text


def _specs(file: Document, path: tuple[str, ...]) -> dict[Role, Fields]:
    """Return the keys and values that a level states, by role."""
    specs: dict[Role, Fields] = {}
    for tensor, role in ROLE_OF.items():
        spec: dict[str, Sourced] = {}
        for key in SPEC_KEYS:
            key_path = (*path, tensor, key)
            value = _value(file, key_path)
            if value is not None:
                spec[key] = Sourced(value, file.place(*key_path))
        if spec:
            specs[role] = spec
    return specs


def _value(file: Document, path: tuple[str, ...]) -> Any:
    """Return the value of a key of a spec; None if there is none, or an item is wrong."""
    value = file.get(*path)
    if isinstance(value, list) and len(file.items(*path)) < len(value):
        return None
    return int(value) if value is not None and path[-1] in _WHOLE else value


def _with_axis_of_heads(role: Role, stated: Fields) -> Fields:
    """Return a spec of the cache, in which `per_channel` without an axis means one scale for
    each head.
    """
    words = Words(role, stated)
    if words.scheme != "per_channel" or words.is_per_token or "ch_axis" in stated:
        return stated
    key = "qscheme" if "qscheme" in stated else "observer_cls"
    return {**stated, "ch_axis": Sourced(_HEAD_AXIS, stated[key].place)}


def _fields(words: Words, *, every: bool) -> dict[str, Sourced]:
    """Return the fields of `QuantizationSpec` that a level states or changes; `every` field of
    the key-value cache.

    A key may decide several fields, and a field may depend on keys of both levels. So both are
    read with and without this level, and fields that differ are changed by it.
    """
    dtype_place = words.stated["dtype"].place if "dtype" in words.stated else None
    merged = words.fields()
    inherited = words.inherited.fields()
    fields: dict[str, Sourced] = {}
    for name, default in QuantizationSpec().to_json().items():
        sourced = merged.get(name, Sourced(default, dtype_place))
        before = inherited.get(name, Sourced(default))
        is_stated = sourced.place is None or sourced.place in words.stated_places
        is_changed = sourced.value != before.value or (name in merged and is_stated)
        if is_changed or every:
            fields[name] = sourced
    return fields
