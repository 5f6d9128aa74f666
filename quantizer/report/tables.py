"""Tables for the terminal. Text in, rich renderables out; printing is `cli`'s business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from quantizer.graph.ir import Graph
from quantizer.plan.model import Plan
from quantizer.report.summary import describe_spec

_BAR = 20  # characters of a full bar
_BAR_DB = 60.0  # an SQNR at which quantization no longer shows


def damage_table(rows: list[dict[str, Any]], limit: int | None = None) -> Table:
    """The layers sorted by damage; the bar is long where much is lost."""
    table = _table(
        ("layer", "left"),
        ("tensor", "left"),
        ("spec", "left"),
        ("local dB", "right"),
        ("accumulated dB", "right"),
        ("loss", "left"),
    )
    for row in rows[:limit]:
        local, accumulated = row["local_sqnr_db"], row["accumulated_sqnr_db"]
        lost = max(0.0, min(1.0, 1 - (accumulated if accumulated is not None else local) / _BAR_DB))
        table.add_row(
            _name(row["layer"]), row["tensor"], row["spec"], _db(local), _db(accumulated), "█" * round(lost * _BAR)
        )
    return table


def metric_table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """One line per metric: float, quantized, difference."""
    table = _table(("metric", "left"), ("float", "right"), ("quantized", "right"), ("change", "right"))
    for name, values in metrics.items():
        before, after = values["float"], values["quantized"]
        table.add_row(name, f"{before:.6g}", f"{after:.6g}", f"{after - before:+.6g}")
    return table


def rule_table(plan: Plan) -> Table:
    """What each block of the config found."""
    table = _table(("rule", "left"), ("selector", "left"), ("layers", "right"), ("tensors", "right"))
    for rule in plan.rules:
        table.add_row(_name(rule.label), _name(rule.selector), str(len(rule.layers)), str(rule.took_effect))
    return table


def plan_table(plan: Plan) -> Table:
    """Each quantized tensor and its spec, in execution order; then what stays float."""
    table = _table(("layer", "left"), ("tensor", "left"), ("spec", "left"))
    for node in plan.graph.nodes:
        for role, tensor in plan.of_layer(node.name).items():
            table.add_row(_name(node.name), role, describe_spec(tensor.spec))
        if node.name in plan.floats and node.row.kind != "structural":
            table.add_row(_name(node.name), "activation", Text(f"float: {plan.floats[node.name]}", style="dim"))
    return table


def layer_table(graph: Graph, tensors: Iterable[tuple[str, str]], floats: Mapping[str, str]) -> Table:
    """All layers: name, operator, output shape ("b" is the batch), quantized tensors, else why the output is float."""
    roles: dict[str, list[str]] = {}
    for layer, role in tensors:
        roles.setdefault(layer, []).append(role)
    table = _table(("layer", "left"), ("operator", "left"), ("output", "left"), ("quantized", "left"))
    for node in graph.nodes:
        shape = "" if node.shape is None else "x".join("b" if size is None else str(size) for size in node.shape)
        what = ", ".join(roles.get(node.name, ())) or Text(floats.get(node.name, ""), style="dim")
        table.add_row(_name(node.name), node.op, shape, what)
    return table


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in columns:
        # A layer name is to be copied into a config: it may wrap, but never lose letters.
        table.add_column(title, justify=justify, overflow="fold", no_wrap=title != "layer")  # type: ignore[arg-type]
    return table


def _name(text: str) -> Text:
    """As it is: brackets in layer names are not markup."""
    return Text(text)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
