"""Tables of plans, layers and damage for the terminal. Printing is `cli`'s business."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import Plan
from quantizer.report.summary import describe_spec
from quantizer.report.view import Listing, View

_BAR = 20
"""Characters of a full bar."""
_LOSSLESS_DB = 144.0
"""Noise this far below a signal is less than float32 resolves with its 24 bits."""


def damage_table(rows: Sequence[Mapping[str, Any]], view: View) -> Listing:
    """The quantized tensors, the most damaged first; `rows` are those of `summary.layer_rows`.

    The bar is the tensor's own noise-to-signal ratio against the worst one's.
    """
    ratios = [10 ** (-row["local_sqnr_db"] / 10) for row in rows]
    worst = max(ratios, default=0.0)
    lines = [
        (
            row["layer"],
            row["tensor"],
            row["spec"],
            row["spec"].partition(" ")[0],
            _db(row["local_sqnr_db"]),
            _db(row["accumulated_sqnr_db"]),
            "█" * round(_BAR * ratio / worst) if 0 < worst < math.inf else "",
        )
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    *figures, bar = "local dB", "accumulated dB", "noise"
    layouts = tuple(("layer", "tensor", spec, *figures, *bars) for spec in ("spec", "format") for bars in ((bar,), ()))
    return view.listing(
        ("layer", "tensor", "spec", "format", *figures, bar),
        lines,
        [row["local_sqnr_db"] if row["local_sqnr_db"] < _LOSSLESS_DB else None for row in rows],
        numbers=tuple(figures),
        layouts=layouts,
        what="tensor",
        idle="without loss",
        also=", and layers.csv has them all",
    )


def metric_table(metrics: Mapping[str, Mapping[str, float]]) -> Listing:
    """One line per metric: float, quantized, difference."""
    rows = [
        (name, f"{v['float']:.6g}", f"{v['quantized']:.6g}", f"{v['quantized'] - v['float']:+.6g}")
        for name, v in metrics.items()
    ]
    titles = ("metric", "float", "quantized", "change")
    return Listing(titles, rows, frozenset(titles[1:]))


def rule_table(plan: Plan) -> Listing:
    """What each block of the config found."""
    rows = [(rule.label, rule.selector, str(len(rule.layers)), str(rule.took_effect)) for rule in plan.rules]
    return Listing(("rule", "selector", "layers", "tensors"), rows, frozenset(("layers", "tensors")))


def plan_table(plan: Plan, view: View) -> Listing:
    """Each tensor's spec, or why it stays float, in execution order."""
    rows: list[tuple[str, ...]] = []
    ranks: list[float | None] = []
    for node in plan.graph.nodes:
        said = [(role, describe_spec(tensor.spec)) for role, tensor in plan.of_layer(node.name).items()]
        said += [(role, f"float: as {at} says") for (name, role), at in plan.off.items() if name == node.name]
        rows += [(node.name, *each) for each in said]
        ranks += [0.0] * len(said)
        if node.name in plan.floats and node.row.kind != "structural":
            rows.append((node.name, "activation", why_float(plan.floats[node.name])))
            ranks.append(None)
    return view.listing(("layer", "tensor", "spec"), rows, ranks, what="tensor", idle="in float")


def layer_table(graph: Graph, tensors: Iterable[tuple[str, str]], floats: Mapping[str, str], view: View) -> Listing:
    """All layers: name, operator, output shape ("b" is the batch), quantized tensors, else why the output is float."""
    roles: dict[str, list[str]] = {}
    for layer, role in tensors:
        roles.setdefault(layer, []).append(role)
    rows = []
    for node in graph.nodes:
        why = why_float(floats[node.name]) if node.name in floats else ""
        rows.append((node.name, node.op, shape_text(node), ", ".join(roles.get(node.name, ())) or why))
    ranks = [0.0 if node.name in roles else None for node in graph.nodes]
    return view.listing(("layer", "operator", "output", "tensors"), rows, ranks, idle="in float")


def why_float(reason: str) -> str:
    """Why a layer's output is not quantized, as a table says it.

    >>> why_float("computed in float"), why_float("quantized at relu")
    ('float: computed in float', 'quantized at relu')
    """
    return reason if reason.startswith("quantized at") else f"float: {reason}"


def shape_text(node: Node) -> str:
    """`bx3x8x8` for an output of any batch size."""
    return "" if node.shape is None else "x".join("b" if size is None else str(size) for size in node.shape)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
