"""Distinguish the two file forms by their keys, and name the keys of the hierarchical form and
the blocks of their schemas.
"""

from functools import lru_cache
from typing import Literal

from quantizer.config.json_types import JsonMapping
from quantizer.config.resources import load_resource
from quantizer.config.wording import closest_word

Form = Literal["layered", "hierarchical"]

HIERARCHICAL_KEYS = frozenset(
    {
        "global_quant_config",
        "layer_type_quant_config",
        "layer_quant_config",
        "exclude",
        "algo_config",
        "pre_quant_opt_config",
    }
)
"""Source: AMD Quark for PyTorch, documentation of `Config`."""

_LAYERED_BLOCKS = frozenset(
    {"overall_quantize_config", "tensor_quantize_config", "layer_quantize_config"}
)
"""Source: Vitis AI, quantization configuration."""


def form_of(value: JsonMapping) -> Form:
    """Return the form of a file: hierarchical with a key of that form, or its required key
    misspelt, and no overall block.

    >>> form_of({"exclude": []}), form_of({"global_quant_confg": {}}), form_of({})
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


SPEC_KEYS = tuple(
    key
    for key, entry in block_of("hierarchical", "spec")["properties"].items()
    if "code" not in entry
)
"""The keys of a spec that have an effect. The schema has a message code for all others."""

ALGORITHM_LISTS = ("pre_quant_opt_config", "algo_config")
"""The lists of algorithms, in the order in which they run."""

CACHE_BLOCK = "kv_cache_quant_config"
"""The key of the block that is about the key-value cache."""
