"""The config as it took effect, in the words of its file form: every global switch written out,
comments gone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from quantizer.config.algorithms import SWITCHES
from quantizer.config.forms.algorithm_words import written
from quantizer.config.forms.hierarchical import LISTS, ROLE_OF, SPEC_KEYS
from quantizer.config.model import CAST_ONLY, Config, Settings

_TOP: Mapping[str, Any] = {
    "layer_type_quant_config": {},
    "layer_quant_config": {},
    "exclude": [],
    "algo_config": None,
    "pre_quant_opt_config": None,
}
"""The optional keys of the hierarchical form, and their defaults."""

_FIXED_DEFAULTS = {"is_dynamic": False, "round_method": "half_even", "scale_type": "float"}


def resolved_document(config: Config) -> dict[str, Any]:
    """A document that means the same as `config` and leaves nothing to defaults.

    Blocks of the layered form are complete in a valid file, so only the switches need filling
    in. In the hierarchical form what a narrower level does not state is written as null, since
    it inherits.
    """
    document = _without_comments(config.document)
    if config.form == "hierarchical":
        return _hierarchical(document, config.settings) | _lists(config, *LISTS)
    switches = {
        f.name: getattr(config.settings, f.name) for f in fields(Settings) if f.name != "places"
    }
    return {**switches, **document, **_lists(config, "algorithms")}


def _lists(config: Config, *keys: str) -> dict[str, Any]:
    """The lists of algorithms that are not empty, each with all its settings as they took
    effect.
    """
    lists = {
        key: [
            written(each.settings) for each in config.algorithms if each.label.startswith(key)
        ]
        for key in keys
    }
    passes = {key: list(_passes(config.document.get(key))) for key in keys}
    return {
        key: [*passes[key], *entries]
        for key, entries in lists.items()
        if passes[key] or entries
    }


def _passes(entries: Any) -> Iterator[dict[str, Any]]:
    """The passes over the graph among the entries of a list, or in the one that stands without
    a list.
    """
    for entry in [entries] if isinstance(entries, Mapping) else entries or ():
        if entry["name"] in SWITCHES:
            yield written(SWITCHES[entry["name"]]())


def _hierarchical(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Every level with every key of every spec; at the global level with the defaults that hold
    there.
    """
    read = {key: document.get(key) or default for key, default in _TOP.items()}
    return read | {
        "global_quant_config": _level(document["global_quant_config"], filled=True)
        | {"target_device": settings.target_device},
        **{
            block: {text: _level(level, filled=False) for text, level in read[block].items()}
            for block in ("layer_type_quant_config", "layer_quant_config")
        },
    }


def _level(level: Mapping[str, Any], *, filled: bool) -> dict[str, Any]:
    specs = {key: _spec(level[key], filled) if level.get(key) else None for key in ROLE_OF}
    return specs | {"target_device": None}


def _spec(spec: Mapping[str, Any], filled: bool) -> dict[str, Any]:
    """All keys; a default that follows from other keys stays null, or narrower levels would
    inherit it as a word.
    """
    stated = {key: spec.get(key) for key in SPEC_KEYS}
    if not filled or stated["dtype"] in CAST_ONLY:
        return stated
    return stated | {
        key: value for key, value in _FIXED_DEFAULTS.items() if stated[key] is None
    }


def _without_comments(value: Any) -> Any:
    """Without `$schema` and the keys that begin with `//`."""
    if isinstance(value, Mapping):
        kept = {
            key: item
            for key, item in value.items()
            if key != "$schema" and not key.startswith("//")
        }
        return {key: _without_comments(item) for key, item in kept.items()}
    return (
        [_without_comments(item) for item in value]
        if isinstance(value, (list, tuple))
        else value
    )
