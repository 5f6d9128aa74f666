"""Translates the hierarchical form (global, layer type, layer name, exclude) into `Config`. Its
words end here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantizer.config.algorithms import SWITCHES
from quantizer.config.diagnostics import Place
from quantizer.config.document.document import Document, ValidDocument
from quantizer.config.forms.algorithm_words import read_algorithms, read_names
from quantizer.config.forms.form import block_of
from quantizer.config.forms.hierarchical_spec import Words
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
"""The role of each of the form's keys for a tensor, and back."""

SPEC_KEYS = tuple(
    key
    for key, said in block_of("hierarchical", "spec")["properties"].items()
    if "code" not in said
)
"""The keys of a spec that say something."""

_WHOLE = frozenset({"ch_axis", "group_size"})
"""Keys of a spec that are whole numbers; JSON may have them with a decimal point."""

LISTS = ("pre_quant_opt_config", "algo_config")
"""The lists of algorithms, in the order in which they run."""

_KINDS: Mapping[str, Literal["type", "name"]] = {
    "layer_type_quant_config": "type",
    "layer_quant_config": "name",
}


@dataclass(frozen=True)
class Level:
    """One `QuantizationConfig`: whom it is about, and what it states of each role's spec, in
    the form's words.

    `wider` is what the global level states, of all roles that it has; nothing for that level
    itself.
    """

    selector: Selector
    label: str
    pointer: tuple[str | int, ...]
    specs: Mapping[Role, Fields]
    wider: Mapping[Role, Fields]

    def inherited(self, role: Role) -> Words:
        """What a wider level states of the role."""
        return Words(role, self.wider.get(role, {}))

    def merged(self, role: Role) -> Words:
        """What holds for the role where this level and a wider one are merged, key by key."""
        return Words(role, self.specs[role]).over(self.inherited(role))

    def rule(self) -> ConfigRule:
        """What it adds to wider levels."""
        stated = {role: dict(self._fields(role)) for role in self.specs}
        return ConfigRule(self.selector, self.label, fields=stated, adds=frozenset(self.specs))

    def _fields(self, role: Role) -> Iterator[tuple[str, Sourced]]:
        """The fields that the level's own keys decide, and those that change with them."""
        before, after = self.inherited(role).fields(), self.merged(role).fields()
        own = {sourced.place for sourced in self.specs[role].values() if sourced.place}
        for name, value in QuantizationSpec().to_json().items():
            default = Sourced(value, self.specs[role].get("dtype", Sourced(None)).place)
            now, then = after.get(name, default), before.get(name, default)
            if now.value != then.value or (
                name in after and (now.place is None or now.place in own)
            ):
                yield name, now


@dataclass(frozen=True)
class Hierarchical:
    """The file level by level, the global one first, then types, then names, and as a config.

    Its rules: nothing is quantized; then what each level adds; then what is excluded. `listed`
    are the names of its algorithms, in the order in which they stand.
    """

    document: Document
    config: Config
    levels: tuple[Level, ...]
    listed: tuple[tuple[str, Place | None], ...] = ()
    ignored: frozenset[str] = frozenset()

    def is_wrong(self, key: str) -> bool:
        """Whether a value of this key is wrong somewhere, so that its absence here says
        nothing.
        """
        return any(pointer.endswith(f"/{key}") for pointer in self.ignored)


def translate(document: Document, ignored: Collection[str] = ()) -> Hierarchical:
    """Translate a document in the form's own words.

    `ignored` are pointers whose values are wrong: they are left out, so that the rest can be
    checked.
    """
    file = _Translator(document, frozenset(ignored))
    levels = tuple(file.levels())
    rules = (
        ConfigRule(Selector("all"), "default", roles=frozenset()),
        *map(Level.rule, levels),
        *file.excludes(),
    )
    listed, algorithms = read_names(file, *LISTS), read_algorithms(file, *LISTS)
    source = document.source
    config = Config(
        file.settings(listed),
        rules,
        source.name,
        document.value,
        "hierarchical",
        algorithms,
        source.text,
    )
    return Hierarchical(document, config, levels, listed, file.ignored)


class _Translator(ValidDocument):
    """Each method reads one part of the document."""

    def settings(self, listed: Sequence[tuple[str, Place | None]]) -> Settings:
        path = ("global_quant_config", "target_device")
        device, places = self.get(*path), {"target_device": self.place(*path)}
        switched = {
            SWITCHES[name].switch: place for name, place in reversed(listed) if name in SWITCHES
        }
        known = {key: place for key, place in (places | switched).items() if place}
        stated: dict[str, Any] = dict.fromkeys(switched, True) | (
            {"target_device": device} if device else {}
        )
        return Settings(**stated, places=known)

    def levels(self) -> Iterator[Level]:
        name = "global_quant_config"
        everywhere = self._specs(name)
        yield Level(
            Selector("weighted", place=self.place(name, key=True)),
            name,
            (name,),
            everywhere,
            {},
        )
        for block, kind in _KINDS.items():
            members = self.get(block)
            for text in members if isinstance(members, dict) else ():
                if not text.startswith("//") and isinstance(self.get(block, text), dict):
                    selector = Selector(kind, text, self.place(block, text, key=True))
                    path = (block, text)
                    yield Level(
                        selector, f'{block}["{text}"]', path, self._specs(*path), everywhere
                    )

    def excludes(self) -> Iterator[ConfigRule]:
        for number, at in enumerate(self.items("exclude")):
            place = self.place("exclude", at)
            selector = Selector("exclude", self.get("exclude", at), place)
            yield ConfigRule(selector, f"exclude[{number}]", frozenset(), place)

    def _specs(self, *path: str) -> dict[Role, Fields]:
        """What is stated of each role at a level that states anything of it."""
        stated = {
            role: {
                key: Sourced(
                    int(value) if key in _WHOLE else value, self.place(*path, word, key)
                )
                for key in SPEC_KEYS
                if (value := self.get(*path, word, key)) is not None
            }
            for word, role in ROLE_OF.items()
            if isinstance(self.get(*path, word), dict)
        }
        return {role: spec for role, spec in stated.items() if spec}
