"""Read report.json for the page: names of layers, the order of rows, the worst tensor and
output.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.report.tables import LOSSLESS_DB


@dataclass(frozen=True)
class Bounds:
    """Below which local SQNR in dB a tensor is marked as low, or as poor."""

    low_db: float
    poor_db: float


_BOUNDS_BY_WIDTH = {2: Bounds(3, 0), 3: Bounds(5, 2), 4: Bounds(10, 5), 6: Bounds(18, 10)}
"""The bounds of tensors of up to so many bits. A bit is worth 6 dB, so that 20 dB is usual for
4 bits and a loss for 8.
"""
_BOUNDS = Bounds(25, 15)
"""The bounds of wider tensors."""
LOW = "low"
POOR = "poor"


def bounds_of(bits: int) -> Bounds:
    """Return the bounds of tensors of a width.

    >>> bounds_of(4), bounds_of(8)
    (Bounds(low_db=10, poor_db=5), Bounds(low_db=25, poor_db=15))
    """
    for width, bounds in _BOUNDS_BY_WIDTH.items():
        if bits <= width:
            return bounds
    return _BOUNDS


def layer_name(content: JsonMapping, layer: str) -> str:
    """Return the module path of a layer, which the page shows as its name."""
    paths = content["paths"]
    return str(paths.get(layer, layer))


def tensor_name(content: JsonMapping, row: JsonMapping) -> str:
    """Return the name of a tensor with that of its layer."""
    layer = layer_name(content, row["layer"])
    return f"{row['tensor']} of {layer}"


def most_damaged(rows: Iterable[JsonObject]) -> JsonObject | None:
    """Return the tensor with the lowest local SQNR, or None if none was measured."""
    measured = [row for row in rows if row["local_sqnr_db"] is not None]
    return min(measured, key=lambda row: row["local_sqnr_db"], default=None)


def rows_in_order(content: JsonMapping) -> list[JsonObject]:
    """Return the tensors in the order of execution."""
    return sorted(content["layers"], key=lambda row: row["order"])


def severity(row: JsonMapping) -> str:
    """Return how low the local SQNR of a tensor is for its width: `LOW`, `POOR` or "".

    >>> severity({"local_sqnr_db": 14.6, "bits": 4}), severity({"local_sqnr_db": 14.6})
    ('', 'poor')
    """
    sqnr_db = row["local_sqnr_db"]
    bounds = bounds_of(row.get("bits", 8))
    if sqnr_db is None or sqnr_db >= bounds.low_db:
        return ""
    return POOR if sqnr_db < bounds.poor_db else LOW


def is_lossless(content: JsonMapping, row: JsonMapping) -> bool:
    """Return whether a test has found no loss in a tensor. JSON has no infinite SQNR."""
    if not content["metrics"]:
        return False
    sqnr_db = row["local_sqnr_db"]
    return sqnr_db is None or sqnr_db >= LOSSLESS_DB


def value_text(value: Any) -> str:
    """Return a value of JSON as text."""
    if isinstance(value, dict):
        texts = [f"{name}: {value_text(item)}" for name, item in value.items()]
    elif isinstance(value, list):
        texts = [value_text(item) for item in value]
    else:
        texts = [str(value)]
    return ", ".join(texts)
