"""A part of a weight's rows that stands for all, to search faster."""

from __future__ import annotations

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.graph.ir import Node

ROWS = 512
"""Rows that a search over a group's layers looks at."""


def sampled_rows(weight: Tensor, spec: QuantizationSpec, node: Node, rows: int) -> tuple[Tensor, float]:
    """Evenly strided rows of a weight, and how many each stands for, if all layers of its group have `rows`.

    All rows where their scales depend on each other, or their inputs differ.
    """
    across = 0 if spec.qscheme == "per_group" else 1
    own = spec.qscheme in ("per_channel", "per_group") and spec.ch_axis != across
    stride = -(-rows // ROWS)
    if not own or stride == 1 or node.row.transposed or node.attrs.get("groups", 1) != 1:
        return weight, 1.0
    sample = weight[::stride]
    return sample, len(weight) / len(sample)
