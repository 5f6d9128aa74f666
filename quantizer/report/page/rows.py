"""Read the rows of report.json: names of layers, order, the worst tensor and output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
WEAK_DB, POOR_DB = 25.0, 15.0
"""Below these a tensor's own quantization is worth a look, or harmful."""


def name_of(content: Json, layer: str) -> str:
    """Return what people call a layer: the path of its module."""
    return str(content["paths"].get(layer, layer))


def tensor_name(content: Json, row: Json) -> str:
    """Return the name of a tensor with that of its layer."""
    return f"{row['tensor']} of {name_of(content, row['layer'])}"


def most_damaged(rows: Sequence[Json]) -> Json | None:
    """Return the tensor with the lowest local SQNR, or None if none was measured."""
    measured = [row for row in rows if row["local_sqnr_db"] is not None]
    return min(measured, key=lambda row: row["local_sqnr_db"], default=None)


def weakest_output(rows: Sequence[Json]) -> Json | None:
    """Return the output or part with the lowest SQNR, or None if none was measured."""
    measured = [row for row in rows if row["sqnr_db"] is not None]
    return min(measured, key=lambda row: row["sqnr_db"], default=None)


def in_order(content: Json) -> list[Json]:
    """Return the tensors in the order of execution."""
    return sorted(content["layers"], key=lambda row: row["order"])


def severity(row: Json) -> str | None:
    """Return the class of a tensor's row: "bad", "warn" or None."""
    sqnr_db = row["local_sqnr_db"]
    if sqnr_db is None:
        return None
    if sqnr_db < POOR_DB:
        return "bad"
    return "warn" if sqnr_db < WEAK_DB else None


def in_words(value: Any) -> str:
    """Return a value of JSON as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {in_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(in_words(item) for item in value)
    return str(value)
