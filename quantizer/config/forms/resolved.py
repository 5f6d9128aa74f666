"""Complete a config's document, in the words of its file form: every switch written out,
without comments. Complete documents are compared value by value.
"""

from collections.abc import Mapping
from typing import Any

from quantizer.config.algorithms import SWITCHES, algorithm_entry, entry_kinds
from quantizer.config.forms.form import ALGORITHM_LISTS, CACHE_BLOCK, SPEC_KEYS
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import CAST_ONLY, ResolvedConfig, Settings
from quantizer.config.roles import ROLE_OF

_DEFAULTS: JsonMapping = {
    "layer_type_quant_config": {},
    "layer_quant_config": {},
    "exclude": [],
    "algo_config": None,
    "pre_quant_opt_config": None,
}
"""The optional keys of the hierarchical form, and their defaults."""

_SPEC_DEFAULTS = {"is_dynamic": False, "round_method": "half_even", "scale_type": "float"}


def resolved_document(config: ResolvedConfig) -> JsonObject:
    """Return a document that means the same as `config` and leaves nothing to defaults.

    Blocks of the layered form are complete in a valid file, so only the switches are filled
    in. In the hierarchical form what a narrower level does not state is written as null, since
    it inherits.
    """
    document = _without_comments(config.document)
    if config.form == "hierarchical":
        resolved = _hierarchical(document, config.settings)
        return resolved | _algorithm_lists(config, *ALGORITHM_LISTS)
    switches = vars(config.settings).copy()
    del switches["places"]
    return {**switches, **document, **_algorithm_lists(config, "algorithms")}


def _algorithm_lists(config: ResolvedConfig, *keys: str) -> JsonObject:
    """Return the lists of algorithms that are not empty, each with all its settings as they
    took effect.
    """
    lists: JsonObject = {}
    for key in keys:
        algorithms = [entry for entry in config.algorithms if entry.path[0] == key]
        entries = _passes(config.document.get(key))
        entries += [algorithm_entry(algorithm.settings) for algorithm in algorithms]
        if entries:
            lists[key] = entries
    return lists


def _passes(entries: Any) -> list[JsonObject]:
    """Return the passes over the graph among the entries of a list, or the one
    without a list.
    """
    if isinstance(entries, Mapping):
        entries = [entries]
    names = [entry["name"] for entry in entries or ()]
    kinds = entry_kinds("hierarchical")
    return [algorithm_entry(kinds[name]()) for name in names if name in SWITCHES]


def _hierarchical(document: JsonObject, settings: Settings) -> JsonObject:
    """Return every level with every key of every spec; at the global level with the defaults
    that hold there.
    """
    resolved = {key: document.get(key) or default for key, default in _DEFAULTS.items()}
    everywhere = _level(document["global_quant_config"], is_global=True)
    everywhere["target_device"] = settings.target_device
    resolved["global_quant_config"] = everywhere
    for block in ("layer_type_quant_config", "layer_quant_config"):
        levels = resolved[block].items()
        resolved[block] = {text: _level(level, is_global=False) for text, level in levels}
    return resolved | _cache(document)


def _cache(document: JsonObject) -> JsonObject:
    """Return the keys of the key-value cache, if it is quantized.

    The specs of the cache inherit nothing, so defaults hold there as at the global level.
    """
    entries = document.get(CACHE_BLOCK)
    if not entries:
        return {}
    resolved: JsonObject = {}
    for text, level in entries.items():
        resolved[text] = _level(level, is_global=False)
        resolved[text]["output_tensors"] = _spec(level["output_tensors"], is_global=True)
    is_after_rotation = document.get("kv_cache_post_rope") is not False
    return {CACHE_BLOCK: resolved, "kv_cache_post_rope": is_after_rotation}


def _level(level: JsonMapping, *, is_global: bool) -> JsonObject:
    stated = {key: level.get(key) for key in ROLE_OF}
    specs = {key: _spec(spec, is_global) if spec else None for key, spec in stated.items()}
    return {**specs, "target_device": None}


def _spec(spec: JsonMapping, is_global: bool) -> JsonObject:
    """Return all keys. A default that follows from other keys stays null, or narrower levels
    would inherit it.
    """
    resolved = {key: spec.get(key) for key in SPEC_KEYS}
    if is_global and resolved["dtype"] not in CAST_ONLY:
        for key, default in _SPEC_DEFAULTS.items():
            if resolved[key] is None:
                resolved[key] = default
    return resolved


def _without_comments(value: Any) -> Any:
    """Return a value without `$schema` and the keys that begin with `//`."""
    if isinstance(value, Mapping):
        keys = [key for key in value if key != "$schema" and not key.startswith("//")]
        return {key: _without_comments(value[key]) for key in keys}
    if isinstance(value, (list, tuple)):
        return [_without_comments(item) for item in value]
    return value
