"""Read report.json for the page: names of layers, the order of rows, the worst tensor and
output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quantizer.config.json_types import JsonMapping, JsonObject

WEAK_DB = 25.0
"""A tensor with a lower local SQNR is marked as a warning."""
POOR_DB = 15.0
"""A tensor with a lower local SQNR is marked as bad."""


def layer_name(content: JsonMapping, layer: str) -> str:
    """Return the module path of a layer, which the page shows as its name."""
    paths = content["paths"]
    return str(paths.get(layer, layer))


def tensor_name(
    content: JsonMapping,
    row: JsonMapping,
) -> str:
    """Return the name of a tensor with that of its layer."""
    layer = layer_name(content, row["layer"])
    return f"{row['tensor']} of {layer}"


def most_damaged(rows: Iterable[JsonObject]) -> JsonObject | None:
    """Return the tensor with the lowest local SQNR, or None if none was measured."""
    lowest = None
    for row in rows:
        value = row["local_sqnr_db"]
        if value is None:
            continue
        if lowest is None or value < lowest["local_sqnr_db"]:
            lowest = row
    return lowest


def rows_in_order(content: JsonMapping) -> list[JsonObject]:
    """Return the tensors in the order of execution."""
    return sorted(content["layers"], key=lambda row: row["order"])


def severity(row: JsonMapping) -> str | None:
    """Return the CSS class of a tensor's row: "bad", "warn" or None."""
    sqnr_db = row["local_sqnr_db"]
    if sqnr_db is None:
        return None
    if sqnr_db < POOR_DB:
        return "bad"
    if sqnr_db < WEAK_DB:
        return "warn"
    return None


def value_text(value: Any) -> str:
    """Return a value of JSON as text."""
    if isinstance(value, dict):
        texts = [f"{name}: {value_text(item)}" for name, item in value.items()]
    elif isinstance(value, list):
        texts = [value_text(item) for item in value]
    else:
        texts = [str(value)]
    return ", ".join(texts)
