"""Translate the hierarchical form (global, layer type, layer name, exclude) into a `Config`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Place
from quantizer.config.document.document import Document, ValidDocument
from quantizer.config.forms.algorithm_words import read_algorithms, read_names
from quantizer.config.forms.form import block_of
from quantizer.config.forms.hierarchical_spec import Words
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.model import (
    Config,
    ConfigRule,
    Fields,
    QuantizationSpec,
    Role,
    Selector,
    Settings,
    Sourced,
)

ROLE_OF: Mapping[str, Role] = {
    "input_tensors": "input",
    "output_tensors": "activation",
    "weight": "weights",
    "bias": "bias",
}
KEY_OF = {role: key for key, role in ROLE_OF.items()}
"""The role of each of the form's keys for a tensor, and the other way round."""

SPEC_KEYS = tuple(
    key
    for key, entry in block_of("hierarchical", "spec")["properties"].items()
    if "code" not in entry
)
"""The keys of a spec that have a meaning; those with a code are only accepted."""

ALGORITHM_LISTS = ("pre_quant_opt_config", "algo_config")
"""The lists of algorithms, in the order in which they run."""

_WHOLE = frozenset({"ch_axis", "group_size"})
"""Keys of a spec that are whole numbers; JSON may have them with a decimal point."""

CACHE_BLOCK = "kv_cache_quant_config"
"""The key of the block that is about the key-value cache."""

_CACHE_KEY = "output_tensors"
"""The key of a spec of the cache in an entry of that block."""

_HEAD_AXIS = 1
"""The axis of the heads in keys and values, which are [batch, heads, tokens, features]."""

_LEVEL_KINDS: Mapping[str, Literal["type", "name"]] = {
    "layer_type_quant_config": "type",
    "layer_quant_config": "name",
}


@dataclass(frozen=True)
class HierarchicalLevel:
    """One `QuantizationConfig`: which layers it selects, and what it states of each role's
    spec, in the form's words.

    `wider` is what the global level states of all its roles; it is empty for that level itself,
    and for the specs of the key-value cache, which inherit nothing.
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
        """Return what the wider level states of the role."""
        return Words(role, self.wider.get(role, {}))

    def merged(self, role: Role) -> Words:
        """Return what holds for the role where this level is merged with the wider one, key by
        key.
        """
        return Words(role, self.specs[role]).over(self.inherited(role))

    def rule(self) -> ConfigRule:
        """Return what this level adds to the wider one."""
        fields = {role: self._fields(role) for role in self.specs}
        return ConfigRule(self.selector, self.label, fields=fields, adds=frozenset(self.specs))

    def _fields(self, role: Role) -> dict[str, Sourced]:
        """Return the fields that the level's keys decide, and those that change with them."""
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
    """The file level by level, the global one first, then types, then names, and as a config.

    The config's rules are: nothing is quantized; then what each level adds; then what is
    excluded. `listed` are the names of its algorithms, in the order of the file.
    """

    document: Document
    config: Config
    levels: tuple[HierarchicalLevel, ...]
    listed: tuple[tuple[str, Place | None], ...] = ()
    ignored: frozenset[str] = frozenset()

    def is_wrong(self, key: str) -> bool:
        """Return whether a value of this key is wrong somewhere, so that the key is not
        missing.
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
    config = Config(
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
        # In reverse, so that the first place of a switch is left
        for name, place in reversed(listed):
            if name in SWITCHES:
                switch = SWITCHES[name].switch
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
                yield HierarchicalLevel(
                    selector,
                    label,
                    path,
                    self._specs(*path),
                    everywhere,
                )
        yield from self._cache_levels(everywhere)

    def _cache_levels(self, everywhere: Mapping[Role, Fields]) -> Iterator[HierarchicalLevel]:
        """Yield a level for the cache of each entry, and before it one for the layers' other
        tensors, if the entry states any.
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
                    Selector("name", text, place),
                    label,
                    path,
                    specs,
                    everywhere,
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
        """Return what a level states of each role that it states anything of."""
        specs: dict[Role, Fields] = {}
        for word, role in ROLE_OF.items():
            if not isinstance(self.get(*path, word), dict):
                continue
            spec: dict[str, Sourced] = {}
            for key in SPEC_KEYS:
                value = self._value(*path, word, key)
                if value is None:
                    continue
                spec[key] = Sourced(value, self.place(*path, word, key))
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
    """Return a spec of the cache, where scales of channels are those of heads."""
    words = Words(role, stated)
    if words.scheme != "per_channel" or words.is_per_token or "ch_axis" in stated:
        return stated
    key = "qscheme" if "qscheme" in stated else "observer_cls"
    return {**stated, "ch_axis": Sourced(_HEAD_AXIS, stated[key].place)}
