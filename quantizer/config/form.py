"""Tells the two file forms apart by their keys. Reads neither."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from quantizer.config.document import Document
from quantizer.config.wording import closest

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

LAYERED_BLOCKS = frozenset({"overall_quantize_config", "tensor_quantize_config", "layer_quantize_config"})
"""Source: Vitis AI, quantization configuration."""


def form_of(document: Document) -> Form:
    """The form of a file.

    >>> form_of(Document.of({"global_quant_config": {}}, "Config"))
    'hierarchical'
    """
    return "hierarchical" if is_hierarchical(document.value) else "layered"


def is_hierarchical(value: Mapping[str, Any]) -> bool:
    """Whether the file has a key of the hierarchical form, or its required one misspelt, and no overall block.

    >>> is_hierarchical({"exclude": []}), is_hierarchical({"global_quant_confg": {}}), is_hierarchical({})
    (True, True, False)
    """
    return _form_of(frozenset(value)) == "hierarchical"


@lru_cache(maxsize=64)
def _form_of(keys: frozenset[str]) -> Form:
    if "overall_quantize_config" in keys:
        return "layered"
    if keys & HIERARCHICAL_KEYS or keys & LAYERED_BLOCKS:
        return "hierarchical" if keys & HIERARCHICAL_KEYS else "layered"
    meant = {closest(key, ("global_quant_config", *LAYERED_BLOCKS)) for key in keys}
    return "hierarchical" if "global_quant_config" in meant else "layered"
