"""Translate the hierarchical form (global, layer type or name, exclude): a `ResolvedConfig`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Place
from quantizer.config.document.document import Document, ValidDocument
from quantizer.config.forms.algorithm_words import read_algorithms, read_names
from quantizer.config.forms.form import ALGORITHM_LISTS, CACHE_BLOCK, SPEC_KEYS
from quantizer.config.forms.hierarchical_spec import Words
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.model import (
    ConfigRule,
    Fields,
    QuantizationSpec,
    ResolvedConfig,
    Role,
    Selector,
    Settings,
    Sourced,
)
from quantizer.config.roles import ROLE_OF

_WHOLE = frozenset({"ch_axis", "group_size"})
"""Keys of a spec that are whole numbers. A file may have them with a decimal point: 128.0."""

_CACHE_KEY = "output_tensors"
"""The key of a tensor whose spec, in an entry of that block, is about the cache."""

_HEAD_AXIS = 1
"""The axis of the heads in keys and values, which are [batch, heads, tokens, features]."""

_LEVEL_KINDS: Mapping[str, Literal["type", "name"]] = {
    "layer_type_quant_config": "type",
    "layer_quant_config": "name",
}


@dataclass(frozen=True)
class HierarchicalLevel:
    """One `QuantizationConfig` of a file: the layers that it selects, and the specs it states.

    Attributes:
        selector: the layers.
        label: how messages call the level.
        pointer: the path to it in the document.
        specs: the keys and values that it states, by role.
        wider: those of the global level, by role. It is empty for that level itself, and for
            the key-value cache, which inherits nothing.
    """

    selector: Selector
    label: str
    pointer: JsonPath
    specs: Mapping[Role, Fields]
    wider: Mapping[Role, Fields]

    @property
    def is_of_cache(self) -> bool:
        """Return whether it is about the key-value cache."""
        return self.selector.kind in ("cache", "cache_source")

    def inherited(self, role: Role) -> Words:
        """Return the keys that the wider level states for the role."""
        return Words(role, self.wider.get(role, {}))

    def merged(self, role: Role) -> Words:
        """Return the keys of the role after this level has overridden the wider one."""
        return Words(role, self.specs[role]).over(self.inherited(role))

    def rule(self) -> ConfigRule:
        """Return the rule with all fields that this level changes in the wider one."""
        fields = {role: self._fields(role) for role in self.specs}
        return ConfigRule(self.selector, self.label, fields=fields, adds=frozenset(self.specs))

    def _fields(self, role: Role) -> dict[str, Sourced]:
        """Return the fields of `QuantizationSpec` that the level states or changes.

        A key may decide several fields, and a field may depend on keys of both levels. So both
        are read with and without this level, and fields that differ are changed by it.
        """
        stated = self.specs[role]
        stated_places = {sourced.place for sourced in stated.values() if sourced.place}
        inherited = self.inherited(role).fields()
        merged = self.merged(role).fields()
        dtype_place = stated["dtype"].place if "dtype" in stated else None
        fields: dict[str, Sourced] = {}
        for name, default in QuantizationSpec().to_json().items():
            sourced = merged.get(name, Sourced(default, dtype_place))
            before = inherited.get(name, Sourced(default))
            is_stated = sourced.place is None or sourced.place in stated_places
            is_changed = sourced.value != before.value or (name in merged and is_stated)
            if is_changed or self.is_of_cache:
                fields[name] = sourced
        return fields


@dataclass(frozen=True)
class Hierarchical:
    """A file in the hierarchical form, level by level and as a config.

    Attributes:
        document: the content of the file.
        config: the config. Its first rule quantizes nothing, then follows one for each level,
            and then one for each entry of `exclude`.
        levels: the global one first, then those of types, names and the key-value cache.
        listed: the names of the algorithms and their places, in the order of the file.
        ignored: pointers to values that are wrong.
    """

    document: Document
    config: ResolvedConfig
    levels: tuple[HierarchicalLevel, ...]
    listed: tuple[tuple[str, Place | None], ...] = ()
    ignored: frozenset[str] = frozenset()

    def is_wrong(self, key: str) -> bool:
        """Return whether a value of this key was left out somewhere because it is wrong.

        Then a check must not report the key as missing.
        """
        return any(pointer.endswith(f"/{key}") for pointer in self.ignored)


def translate_hierarchical(document: Document, ignored: Collection[str] = ()) -> Hierarchical:
    """Translate a document in the form's own words.

    `ignored` are pointers whose values are wrong: they are left out, so that the valid part can
    be checked.
    """
    file = _Translator(document, frozenset(ignored))
    levels = tuple(file.levels())
    rules = [ConfigRule(Selector("all"), "default", roles=frozenset())]
    rules += [level.rule() for level in levels]
    rules += file.excludes()
    listed = read_names(file, *ALGORITHM_LISTS)
    config = ResolvedConfig(
        settings=file.settings(listed),
        rules=tuple(rules),
        source=document.source.name,
        document=document.value,
        form="hierarchical",
        algorithms=read_algorithms(file, *ALGORITHM_LISTS),
        text=document.source.text,
    )
    return Hierarchical(document, config, levels, listed, file.ignored)


class _Translator(ValidDocument):
    """A document whose parts are read by one method each."""

    def settings(self, listed: Sequence[tuple[str, Place | None]]) -> Settings:
        """Return the global settings, with the place of each.

        Args:
            listed: the names of algorithms that are listed, with their places.
        """
        stated: JsonObject = {}
        places: dict[str, Place] = {}
        path = ("global_quant_config", "target_device")
        device = self.get(*path)
        device_place = self.place(*path)
        if device:
            stated["target_device"] = device
        if device_place:
            places["target_device"] = device_place
        # In reverse, so that the first entry of a switch decides its place
        for name, place in reversed(listed):
            if name in SWITCHES:
                switch = SWITCHES[name]
                stated[switch] = True
                if place:
                    places[switch] = place
        return Settings(**stated, places=places)

    def levels(self) -> Iterator[HierarchicalLevel]:
        """Yield the levels of the file, widest first."""
        name = "global_quant_config"
        everywhere = self._specs(name)
        selector = Selector("weighted", place=self.place(name, key=True))
        yield HierarchicalLevel(selector, name, (name,), everywhere, {})
        for block, kind in _LEVEL_KINDS.items():
            members = self.get(block)
            for text in members if isinstance(members, dict) else ():
                if text.startswith("//") or not isinstance(self.get(block, text), dict):
                    continue
                path = (block, text)
                selector = Selector(kind, text, self.place(*path, key=True))
                label = f'{block}["{text}"]'
                yield HierarchicalLevel(selector, label, path, self._specs(*path), everywhere)
        yield from self._cache_levels(everywhere)

    def _cache_levels(self, everywhere: Mapping[Role, Fields]) -> Iterator[HierarchicalLevel]:
        """Yield the levels of the entries about the key-value cache.

        Each has one for the keys or values that its layers compute. Before it comes one for
        the other tensors of the layers, if the entry states any.
        """
        is_after_rotation = self.get("kv_cache_post_rope") is not False
        role: Role = "input" if is_after_rotation else "activation"
        entries = self.get(CACHE_BLOCK)
        for text in entries if isinstance(entries, dict) else ():
            if text.startswith("//") or not isinstance(self.get(CACHE_BLOCK, text), dict):
                continue
            path = (CACHE_BLOCK, text)
            place = self.place(*path, key=True)
            label = f'{CACHE_BLOCK}["{text}"]'
            specs = self._specs(*path)
            cached = specs.pop(ROLE_OF[_CACHE_KEY], None)
            if specs:
                yield HierarchicalLevel(
                    Selector("name", text, place), label, path, specs, everywhere
                )
            if cached:
                kind: Literal["cache", "cache_source"] = "cache_source"
                if is_after_rotation:
                    kind = "cache"
                yield HierarchicalLevel(
                    Selector(kind, text, place),
                    label,
                    path,
                    {role: _with_axis_of_heads(role, cached)},
                    {},
                )

    def excludes(self) -> Iterator[ConfigRule]:
        """Yield a rule for each entry of `exclude`."""
        for number, index in enumerate(self.items("exclude")):
            place = self.place("exclude", index)
            selector = Selector("exclude", self.get("exclude", index), place)
            yield ConfigRule(selector, f"exclude[{number}]", frozenset(), place)

    def _specs(self, *path: str) -> dict[Role, Fields]:
        """Return the keys and values that a level states, by role."""
        specs: dict[Role, Fields] = {}
        for tensor, role in ROLE_OF.items():
            if not isinstance(self.get(*path, tensor), dict):
                continue
            spec: dict[str, Sourced] = {}
            for key in SPEC_KEYS:
                value = self._value(*path, tensor, key)
                if value is None:
                    continue
                spec[key] = Sourced(value, self.place(*path, tensor, key))
            if spec:
                specs[role] = spec
        return specs

    def _value(self, *path: str) -> Any:
        """Return the value of a key of a spec; None if there is none, or an item is wrong."""
        value = self.get(*path)
        if isinstance(value, list) and len(self.items(*path)) < len(value):
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
