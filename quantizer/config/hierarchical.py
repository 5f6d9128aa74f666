"""Translates the hierarchical form (global, layer type, layer name, exclude) into `Config`. Its words end here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from quantizer.config.algorithm_words import read_algorithms
from quantizer.config.document import Document, ValidDocument
from quantizer.config.hierarchical_spec import normalized, over
from quantizer.config.model import (
    Algorithm,
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
"""The role of each of the form's keys for a tensor, and back."""

SPEC_KEYS = (
    "dtype",
    "is_dynamic",
    "observer_cls",
    "qscheme",
    "ch_axis",
    "group_size",
    "symmetric",
    "round_method",
    "scale_type",
    "percentage",
    "mx_element_dtype",
    "scale_calculation_mode",
    "scale_format",
)
"""The keys of a spec that say something."""

_DEFAULTS = QuantizationSpec()


@dataclass(frozen=True)
class Level:
    """One `QuantizationConfig`: whom it is about, and what it states of each role's spec, in the form's words."""

    selector: Selector
    label: str
    pointer: tuple[str | int, ...]
    specs: Mapping[Role, Fields]

    def over(self, wider: Level | None, role: Role) -> dict[str, Sourced]:
        """What holds for the role where this level and a wider one are merged, key by key."""
        return over(self.specs.get(role, {}), wider.specs.get(role, {}) if wider else {}, role)


@dataclass(frozen=True)
class Hierarchical:
    """The file level by level: the global one first, then types, then names."""

    document: Document
    settings: Settings
    levels: tuple[Level, ...]
    excludes: tuple[Selector, ...]
    algorithms: tuple[Algorithm, ...] = ()
    ignored: frozenset[str] = frozenset()

    def is_wrong(self, key: str) -> bool:
        """Whether a value of this key is wrong somewhere, so that its absence here says nothing."""
        return any(pointer.endswith(f"/{key}") for pointer in self.ignored)

    def wider(self, level: Level) -> Level | None:
        """The global level, unless the level is that itself."""
        return self.levels[0] if level is not self.levels[0] else None

    def config(self) -> Config:
        """The rules: nothing is quantized; then what each level adds; then what is excluded."""
        rules = (
            ConfigRule(Selector("all"), "default", roles=frozenset()),
            *map(self._rule, self.levels),
            *(
                ConfigRule(selector, f"exclude[{at}]", frozenset(), selector.place)
                for at, selector in enumerate(self.excludes)
            ),
        )
        source = self.document.source.name
        return Config(self.settings, rules, source, self.document.value, "hierarchical", self.algorithms)

    def _rule(self, level: Level) -> ConfigRule:
        stated = {role: dict(self._fields(level, role)) for role in level.specs}
        return ConfigRule(level.selector, level.label, fields=stated, adds=frozenset(level.specs))

    def _fields(self, level: Level, role: Role) -> Iterator[tuple[str, Sourced]]:
        """The fields that the level's own keys decide, and those that change with them."""
        wider = self.wider(level)
        before = normalized(wider.specs.get(role, {}), role) if wider else {}
        after = normalized(level.over(wider, role), role)
        own = {sourced.place for sourced in level.specs[role].values() if sourced.place}
        for name in (field.name for field in fields(QuantizationSpec)):
            default = Sourced(getattr(_DEFAULTS, name), level.specs[role].get("dtype", Sourced(None)).place)
            now, then = after.get(name, default), before.get(name, default)
            if now.value != then.value or (name in after and (now.place is None or now.place in own)):
                yield name, now


def translate(document: Document, ignored: Collection[str] = ()) -> Hierarchical:
    """Translate a document in the form's own words.

    `ignored` are pointers whose values are wrong: they are left out, so that the rest can be checked.
    """
    translator = _Translator(document, frozenset(ignored))
    levels, excludes = tuple(translator.levels()), tuple(translator.excludes())
    algorithms = read_algorithms(translator, "pre_quant_opt_config", "algo_config")
    return Hierarchical(document, translator.settings(), levels, excludes, algorithms, translator.ignored)


class _Translator(ValidDocument):
    """Each method reads one part of the document."""

    def settings(self) -> Settings:
        path = ("global_quant_config", "target_device")
        device = self.get(*path)
        if device is None:
            return Settings()
        place = self.place(*path)
        return Settings(target_device=device, places={"target_device": place} if place else {})

    def levels(self) -> Iterator[Level]:
        name = "global_quant_config"
        yield self._level(Selector("weighted", place=self.place(name, key=True)), name, (name,))
        kinds: tuple[tuple[str, Literal["type", "name"]], ...] = (
            ("layer_type_quant_config", "type"),
            ("layer_quant_config", "name"),
        )
        for block, kind in kinds:
            for text in self._members(block):
                selector = Selector(kind, text, self.place(block, text, key=True))
                yield self._level(selector, f'{block}["{text}"]', (block, text))

    def excludes(self) -> Iterator[Selector]:
        entries = self.get("exclude")
        for at in range(len(entries) if isinstance(entries, list) else 0):
            text = self.get("exclude", at)
            if text is not None:
                yield Selector("exclude", text, self.place("exclude", at))

    def _level(self, selector: Selector, label: str, path: tuple[str | int, ...]) -> Level:
        specs = {
            role: block
            for key, role in ROLE_OF.items()
            if isinstance(self.get(*path, key), dict) and (block := self._block(*path, key))
        }
        return Level(selector, label, path, specs)

    def _block(self, *path: str | int) -> Fields:
        found = {key: value for key in SPEC_KEYS if (value := self.get(*path, key)) is not None}
        return {key: Sourced(value, self.place(*path, key)) for key, value in found.items()}

    def _members(self, *path: str | int) -> list[str]:
        """The selectors in a block; keys that are comments are none."""
        block = self.get(*path)
        known = block if isinstance(block, dict) else {}
        return [key for key in known if not key.startswith("//") and isinstance(self.get(*path, key), dict)]
