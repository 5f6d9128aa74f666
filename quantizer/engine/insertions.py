"""Inserted layers as JSON: all but their tensors, which stand in files of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantizer.graph.edits import Insertion


def described(row: Insertion) -> dict[str, Any]:
    """An insertion without its tensor."""
    return {
        "name": row.name,
        "op": row.op,
        "source": row.source,
        "readers": list(row.readers),
        "attrs": dict(row.attrs),
    }


def insertion(row: Mapping[str, Any], weight: Tensor) -> Insertion:
    """The inverse of `described`.

    Raises KeyError for what it does not write.
    """
    return Insertion(row["name"], row["op"], row["source"], tuple(row["readers"]), weight, row["attrs"])
