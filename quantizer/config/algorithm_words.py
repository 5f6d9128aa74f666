"""Translates entries of `algo_config`, `pre_quant_opt_config` and `algorithms`, and writes them. Checks nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from quantizer.config.algorithms import ALGORITHMS, Algorithm, Awq, Gptq, Names, ScalingLayer
from quantizer.config.diagnostics import Place
from quantizer.config.model import Sourced
from quantizer.config.resources import load_resource
from quantizer.config.valid_document import ValidDocument

NAME_KEYS: Mapping[str, str] = {
    "model_decoder_layers": "blocks",
    "inside_layer_modules": "inside",
    "scaling_layers": "scaling",
    "embedding_layers": "embeddings",
}
"""The key for each field of `Names`."""

FIND_CODES = frozenset(name for name, kind in ALGORITHMS.items() if kind.stage == "round" or kind is Awq)
"""The algorithms that find weight codes, and so have nothing to do where no weights are quantized."""

UNREAD: Mapping[str, str] = {
    "num_attention_heads": "heads are found on the graph",
    "num_key_value_heads": "heads are found on the graph",
    "module2inspect": "the outputs of the layers themselves are compared",
}
"""Keys of other tools that nothing reads, the last one of scaling_layers, and why."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Entry:
    """One algorithm as the file states it: the class, the keys that are stated, and where; UNREAD keys, each once."""

    kind: type[Algorithm]
    path: Path
    stated: Mapping[str, Sourced]
    names: Names = field(default_factory=Names)
    place: Place | None = None
    unread: Mapping[str, Place | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`algo_config[0]`, or `algo_config` where one algorithm stands without a list."""
        return str(self.path[0]) + "".join(f"[{part}]" for part in self.path[1:])

    @property
    def needs_static_groups(self) -> bool:
        """Whether the order by activation, stated or not, meets groups that are not static by default only."""
        settings = self.settings()
        unstated = "static_groups" not in self.stated
        return unstated and bool(settings.get("desc_act")) and not settings["static_groups"]

    def settings(self) -> dict[str, Any]:
        """Every setting: what is stated, or the default."""
        known = defaults(self.kind.name)
        return {key: self.stated[key].value if key in self.stated else default for key, default in known.items()}

    def algorithm(self) -> Algorithm:
        """What runs: of `desc_act` and `static_groups`, which exclude each other, a stated one beats a default."""
        settings = self.settings()
        if issubclass(self.kind, Gptq):
            settings["static_groups"] |= self.needs_static_groups
            if "desc_act" not in self.stated:
                settings["desc_act"] &= settings["static_groups"]
        typed = {key: _typed(self.kind, key, value) for key, value in settings.items()}
        return self.kind(**typed, names=self.names, label=self.label, place=self.place)


def read_algorithms(view: ValidDocument, *blocks: str) -> tuple[Entry, ...]:
    """The entries of the blocks in order; one algorithm may stand without a list. Unknown ones are left out."""
    return tuple(entry for block in blocks for path in _paths(view, block) if (entry := _entry(view, path)))


def written(algorithm: Algorithm) -> dict[str, Any]:
    """The entry that says the same as an algorithm, with every setting.

    >>> written(ALGORITHMS["awq"]())
    {'name': 'awq', 'scale_search': True, 'clip_search': True, 'grid': 20}
    """
    settings = {key: _as_json(getattr(algorithm, key)) for key in defaults(algorithm.name)}
    found = {key: getattr(algorithm.names, name) for key, name in NAME_KEYS.items()}
    named = {key: _as_json(value) for key, value in found.items() if value is not None}
    return {"name": algorithm.name, **settings, **named}


@cache
def defaults(name: str) -> Mapping[str, Any]:
    """The settings that a file may state of an algorithm, and their defaults there."""
    keys = load_resource("schemas", "hierarchical.schema.json")["definitions"][name]["properties"]
    known = {setting.name for setting in fields(ALGORITHMS[name])} - {"names", "label", "place"}
    return {key: entry["default"] for key, entry in keys.items() if key in known}


def _paths(view: ValidDocument, block: str) -> Iterator[Path]:
    value = view.get(block)
    if isinstance(value, dict):
        yield (block,)
    elif isinstance(value, list):
        yield from ((block, at) for at in range(len(value)))


def _entry(view: ValidDocument, path: Path) -> Entry | None:
    name = view.get(*path, "name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        return None
    keys = load_resource("schemas", "hierarchical.schema.json")["definitions"][name]["properties"]
    found = {key: value for key in keys if (value := _sound(view, *path, key)) is not None}
    stated = {key: Sourced(value, view.place(*path, key)) for key, value in found.items() if key not in NAME_KEYS}
    names = {key: value for key, value in found.items() if key in NAME_KEYS and value not in ("", [])}
    unread = dict(reversed(list(_unread(view, path))))  # of each key the first place
    return Entry(ALGORITHMS[name], path, stated, _names(view, path, names), view.place(*path, "name"), unread)


def _unread(view: ValidDocument, path: Path) -> Iterator[tuple[str, Place | None]]:
    """Each key of UNREAD that says something (-1 does not), and where."""
    layers = view.get(*path, "scaling_layers")
    entries = ((*path, "scaling_layers", at) for at in range(len(layers) if isinstance(layers, list) else 0))
    for where in (path, *entries):
        yield from ((key, view.place(*where, key)) for key in UNREAD if view.get(*where, key) not in (None, -1))


def _names(view: ValidDocument, path: Path, stated: Mapping[str, Any]) -> Names:
    """What is stated; an empty name or list, as older files have it, states nothing."""
    values: dict[str, Any] = {
        NAME_KEYS[key]: tuple(value) if isinstance(value, list) else value for key, value in stated.items()
    }
    if "scaling" in values:
        entries = ((*path, "scaling_layers", at) for at in range(len(view.get(*path, "scaling_layers"))))
        values["scaling"] = tuple(_scaling_layer(view, entry) for entry in entries if view.get(*entry) is not None)
    places = {NAME_KEYS[key]: place for key in stated if (place := view.place(*path, key))}
    return Names(**values, places=places)


def _sound(view: ValidDocument, *path: str | int) -> Any:
    """A value; of a list the items that are not wrong."""
    value = view.get(*path)
    return (
        [view.get(*path, at) for at in range(len(value)) if view.get(*path, at) is not None]
        if isinstance(value, list)
        else value
    )


def _scaling_layer(view: ValidDocument, path: Path) -> ScalingLayer:
    layers, prev_op, inp = (view.get(*path, key) for key in ("layers", "prev_op", "inp"))
    return ScalingLayer(tuple(layers or ()), prev_op or "", inp or "", view.place(*path))


def _typed(kind: type[Algorithm], key: str, value: Any) -> Any:
    """JSON has one kind of numbers, and lists where settings are tuples."""
    if isinstance(value, list):
        return tuple(map(float, value))
    default = next(setting.default for setting in fields(kind) if setting.name == key)
    whole = isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(default)(value) if whole and isinstance(default, (int, float)) else value


def _as_json(value: Any) -> Any:
    if isinstance(value, ScalingLayer):
        found = {"prev_op": value.prev_op, "layers": list(value.layers), "inp": value.inp}
        return {key: item for key, item in found.items() if item}
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value
