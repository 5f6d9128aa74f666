"""Tables for the terminal. Text in, rich renderables out; printing is `cli`'s business."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import Plan
from quantizer.report.summary import describe_spec

_BAR = 20  # characters of a full bar


@dataclass(frozen=True)
class Listing:
    """Rows under titles; the first column is a name to copy, so it wraps but never loses letters.

    Where the terminal is too narrow for one line a row, each row is its name and, indented below, its other columns.
    """

    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: frozenset[str] = frozenset()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(len(text) for text in column) for column in zip(self.titles, *self.rows, strict=True)]
        if sum(widths) + 2 * len(widths) <= options.max_width:
            yield self._table()
            return
        for name, *values in self.rows:
            yield Text(name)
            told = [f"{title} {value}" for title, value in zip(self.titles[1:], values, strict=True) if value]
            yield Padding(Text("  ".join(told)), (0, 0, 0, 4))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in self.titles:
            table.add_column(title, justify="right" if title in self.numbers else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*map(Text, row))  # brackets in layer names are not markup
        return table


def damage_table(rows: list[dict[str, Any]]) -> Listing:
    """The tensors sorted by damage; the bar is the tensor's own noise-to-signal ratio against the worst one's."""
    ratios = [10 ** (-row["local_sqnr_db"] / 10) for row in rows]
    worst = max(ratios, default=0.0)
    lines = [
        (
            row["layer"],
            row["tensor"],
            row["spec"],
            _db(row["local_sqnr_db"]),
            _db(row["accumulated_sqnr_db"]),
            "█" * round(_BAR * ratio / worst) if 0 < worst < math.inf else "",
        )
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    titles = ("layer", "tensor", "spec", "local dB", "accumulated dB", "noise")
    return Listing(titles, lines, frozenset(("local dB", "accumulated dB")))


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


def plan_table(plan: Plan) -> Listing:
    """Each quantized tensor and its spec, in execution order; then what stays float."""
    rows: list[tuple[str, ...]] = []
    for node in plan.graph.nodes:
        rows += [(node.name, role, describe_spec(tensor.spec)) for role, tensor in plan.of_layer(node.name).items()]
        rows += [
            (node.name, role, f"float: float32 at {at}") for (name, role), at in plan.off.items() if name == node.name
        ]
        if node.name in plan.floats and node.row.kind != "structural":
            rows.append((node.name, "activation", f"float: {plan.floats[node.name]}"))
    return Listing(("layer", "tensor", "spec"), rows)


def layer_table(graph: Graph, tensors: Iterable[tuple[str, str]], floats: Mapping[str, str]) -> Listing:
    """All layers: name, operator, output shape ("b" is the batch), quantized tensors, else why the output is float."""
    roles: dict[str, list[str]] = {}
    for layer, role in tensors:
        roles.setdefault(layer, []).append(role)
    rows = []
    for node in graph.nodes:
        why = f"float: {floats[node.name]}" if node.name in floats else ""
        rows.append((node.name, node.op, shape_text(node), ", ".join(roles.get(node.name, ())) or why))
    return Listing(("layer", "operator", "output", "tensors"), rows)


def shape_text(node: Node) -> str:
    """`bx3x8x8` for an output of any batch size."""
    return "" if node.shape is None else "x".join("b" if size is None else str(size) for size in node.shape)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
