"""Tells the two file forms apart by their keys. Reads neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quantizer.config.document import Document

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


def form_of(document: Document) -> Form:
    """The form of a file.

    >>> form_of(Document.of({"global_quant_config": {}}, "Config"))
    'hierarchical'
    """
    return "hierarchical" if is_hierarchical(document.value) else "layered"


def is_hierarchical(value: Mapping[str, Any]) -> bool:
    """Whether the file has a key of the hierarchical form and no overall block."""
    return not HIERARCHICAL_KEYS.isdisjoint(value) and "overall_quantize_config" not in value
