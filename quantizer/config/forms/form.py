"""Distinguish the two file forms by their keys. Name the keys of the hierarchical form and the
blocks of their schemas. Find absent plug-ins that a schema names.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from quantizer.config.json_types import JsonMapping
from quantizer.config.resources import load_resource
from quantizer.config.wording import closest_word
from quantizer.plugins import absent

Form = Literal["layered", "hierarchical"]

HIERARCHICAL_KEYS = frozenset(
    {
        "global_quant_config",
        "layer_type_quant_config",
        "layer_quant_config",
        "algo_config",
        "pre_quant_opt_config",
    }
)
"""Those that the layered form lacks. `exclude` is in both.

Source: AMD Quark for PyTorch, documentation of `Config`.
"""

_LAYERED_BLOCKS = frozenset(
    {"overall_quantize_config", "tensor_quantize_config", "layer_quantize_config"}
)
"""Source: Vitis AI, quantization configuration."""

ALGORITHM_LISTS = ("pre_quant_opt_config", "algo_config")
"""The lists of algorithms of the hierarchical form, in the order in which they run."""
ALGORITHM_BLOCKS: Mapping[Form, tuple[str, ...]] = {
    "layered": ("algorithms",),
    "hierarchical": ALGORITHM_LISTS,
}
"""The blocks of a form that list algorithms."""

CACHE_BLOCK = "kv_cache_quant_config"
"""The key of the block that is about the key-value cache."""


def form_of(value: JsonMapping) -> Form:
    """Return the form of a file: hierarchical with a key of that form, or its required key
    misspelt, and no overall block.

    >>> form_of({"algo_config": []}), form_of({"global_quant_confg": {}}), form_of({})
    ('hierarchical', 'hierarchical', 'layered')
    """
    return _form_of(frozenset(value))


@lru_cache(maxsize=64)
def _form_of(keys: frozenset[str]) -> Form:
    if "overall_quantize_config" in keys:
        return "layered"
    if keys & HIERARCHICAL_KEYS:
        return "hierarchical"
    if keys & _LAYERED_BLOCKS:
        return "layered"
    meant = {closest_word(key, ("global_quant_config", *_LAYERED_BLOCKS)) for key in keys}
    return "hierarchical" if "global_quant_config" in meant else "layered"


def block_of(form: Form, name: str = "") -> JsonMapping:
    """Return a block by its name in the form's schema; without a name, the file itself."""
    schema: JsonMapping = load_resource("schemas", f"{form}.schema.json")
    return schema["definitions"][name] if name else schema


def shipped_algorithms(form: Form) -> tuple[str, ...]:
    """Return the algorithms that the form's schema names."""
    return tuple(block_of(form)["definitions"]["algorithm"]["properties"]["name"]["enum"])


SPEC_KEYS = tuple(
    key
    for key, entry in block_of("hierarchical", "spec")["properties"].items()
    if "code" not in entry
)
"""The keys of a spec that have an effect. The schema has a message code for all others."""


def _absent_plugin(entry: JsonMapping) -> str:
    """Return the plug-in that an entry of a schema needs, if it is not there; else ""."""
    name: str = entry.get("plugin", "")
    return name if name and absent(name) else ""


def plugin_of_setting(key: str) -> str:
    """Return the plug-in that a global setting needs, if it is not there; else ""."""
    return _absent_plugin(block_of("layered")["properties"].get(key, {}))


def plugin_of_algorithm(name: str) -> str:
    """Return the plug-in that an algorithm needs, if it is not there; else ""."""
    return _absent_plugin(block_of("hierarchical")["definitions"].get(name, {}))


def plugin_of_results(key: str) -> str:
    """Return the plug-in that an entry of the header of results needs, if it is not there; else
    "".
    """
    header = load_resource("schemas", "quant_info.schema.json")["properties"]["header"]
    return _absent_plugin(header["properties"].get(key, {}))


def remedy(plugin: str) -> str:
    """Return how to get a plug-in that is not there."""
    return f"install a quantizer that has the plug-in {plugin}"


def missing_of_results(header: Mapping[str, Any]) -> list[str]:
    """Return the plug-ins that results were made with and that are not there.

    Args:
        header: of the results.
    """
    found = [plugin_of_setting(key) for key, value in header["settings"].items() if value]
    found += [plugin_of_algorithm(entry["name"]) for entry in header["algorithms"]]
    found += [plugin_of_results(key) for key, value in header.items() if value]
    return [name for name in dict.fromkeys(found) if name]
