"""Write report.html: the content of report.json on one page, complete without its script."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.wording import joined
from quantizer.evaluation.output_warnings import NOTES
from quantizer.evaluation.scores import MAX_RELATIVE_CHANGE
from quantizer.printable import Markup, fragment, with_code
from quantizer.report.next_step import relative_loss, try_next
from quantizer.report.page import figures, summary
from quantizer.report.page.axes import number
from quantizer.report.page.figures import ACCUMULATED, LOCAL, measured_rows, page_file
from quantizer.report.rows import (
    LOW,
    POOR,
    Bounds,
    bounds_of,
    is_lossless,
    layer_name,
    rows_in_order,
    severity,
    tensor_name,
    value_text,
)
from quantizer.report.tables import format_text, usual_specs, usual_text
from quantizer.report.view import TableView

MAX_CLIPPED = 0.01
"""A tensor with a larger share of clipped values is listed under coverage."""
_LOCAL_KEY = "local_sqnr_db"
STEEP_DB = 3.0
"""A larger loss from one tensor to the next is mentioned below the drawing of SQNR by depth."""


def warned_outputs(content: JsonMapping) -> set[str]:
    """Return the outputs that a warning is about."""
    warnings = content.get("warnings", ())
    return {warning["output"] for warning in warnings if warning["kind"] not in NOTES}


def is_held(content: JsonMapping) -> bool:
    """Return whether all metrics of the task lose at most 1 %. Then nothing is marked as a
    fault.
    """
    losses = [relative_loss(content, name) for name in content["pairs"]]
    return bool(losses) and max(losses) <= MAX_RELATIVE_CHANGE


def steepest_fall(content: JsonMapping) -> tuple[float, JsonObject] | None:
    """Return the largest loss of accumulated SQNR from one tensor to the next in dB, and the
    row of the second tensor; None if none is above `STEEP_DB`.
    """
    steepest: tuple[float, JsonObject] = (STEEP_DB, {})
    for before, after in itertools.pairwise(measured_rows(content)):
        loss_db = before["accumulated_sqnr_db"] - after["accumulated_sqnr_db"]
        if loss_db > steepest[0]:
            steepest = (loss_db, after)
    return steepest if steepest[1] else None


def rows_by_loss(content: JsonMapping) -> dict[str, list[JsonObject]]:
    """Return the tensors that lose something, or that no test has measured, as `damaged`, and
    the others as `lossless`.
    """
    rows: dict[str, list[JsonObject]] = {"damaged": [], "lossless": []}
    for row in content["layers"]:
        rows["lossless" if is_lossless(content, row) else "damaged"].append(row)
    return rows


def error_share(sqnr_db: float | None) -> float | None:
    """Return the amplitude of the error in percent of that of the values.

    >>> error_share(20.0)
    10.0
    """
    return None if sqnr_db is None else 100.0 * 10.0 ** (-sqnr_db / 20)


def channel_facts(row: JsonMapping) -> str:
    """Return a line about the channels of a weight, shown while its drawing is folded."""
    channels = row["channels"]
    narrowest, widest = channels["widths"]
    facts = f"{channels['count']} channels, {channels['dead']} of them dead"
    if narrowest:
        ratio = number(widest / narrowest)
        facts += f", the widest range {ratio} times the narrowest"
    return facts


def last_to_be_stable(content: JsonMapping) -> list[JsonObject]:
    """Return the tensors with curves over batches, those first that become stable last."""
    rows = [row for row in content["layers"] if "batches" in row]
    return sorted(rows, key=lambda row: -row["batches"]["stable_after"])


def still_changes(row: JsonMapping) -> bool:
    """Return whether the range of a tensor changes with the last of several batches."""
    batches = row["batches"]
    return bool(batches["total"] > 1 and batches["stable_after"] == batches["total"])


def stable_after(content: JsonMapping, rows: list[JsonObject]) -> list[str]:
    """Return a line for each tensor: its name, and after how many batches it is stable."""
    return [f"{tensor_name(content, row)}: {row['batches']['stable_after']}" for row in rows]


def coverage(content: JsonMapping) -> dict[str, list[str]]:
    """Return the names of tensors that are not quantized, or quantized badly, by the reason."""
    clipped = f"clipped by more than {100 * MAX_CLIPPED:g} %"
    lists: dict[str, list[str]] = {
        "always zero": [],
        "constant": [],
        clipped: [],
        "with dead channels": [],
        "in float": [],
    }
    for row in content["layers"]:
        name = tensor_name(content, row)
        if "low" in row and row["low"] == row["high"]:
            reason = "constant" if row["low"] else "always zero"
            lists[reason].append(name)
        if row.get("clipped", 0) > MAX_CLIPPED:
            lists[clipped].append(name)
        if row.get("channels", {}).get("dead", 0) > 0:
            lists["with dead channels"].append(name)
    for layer, reason in content["floats"].items():
        if not reason.startswith("quantized at"):
            name = layer_name(content, layer)
            lists["in float"].append(f"{name}: {reason}")
    return lists


def absent_kinds(lists: Mapping[str, Sequence[str]]) -> str:
    """Return the reasons of `coverage` for which there are no tensors, as a sentence's part.

    >>> absent_kinds({"always zero": [], "constant": ["a"], "in float": []})
    'always zero or in float'
    """
    absent = [reason for reason, names in lists.items() if not names]
    return joined(absent, "or") if absent else ""


def remarks(content: JsonMapping) -> list[str]:
    """Return the notes of algorithms about single layers."""
    rows = content["algorithms"]["remarks"]
    return [f"{layer_name(content, row['layer'])}: {row['text']}" for row in rows]


def width_titles(widths: list[str]) -> list[str]:
    """Return the titles of the columns of a table of widths."""
    return [f"{width} bits" if width.isdigit() else width for width in widths]


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        title: with the unit.
        key: of the figure in a row of report.json.
        form: of the number.
        meaning: a phrase for the legend.
        factor: the figure is multiplied by it.
    """

    title: str
    key: str
    form: str
    meaning: str
    factor: float = 1.0

    @property
    def is_local(self) -> bool:
        """Return whether rows are marked by this figure."""
        return self.key == _LOCAL_KEY

    def value(self, row: JsonMapping) -> float | None:
        """Return the figure of a row; None where there is none."""
        figure = row.get(self.key)
        return None if figure is None else figure * self.factor


_COLUMNS = (
    Column(
        "local SQNR, dB",
        _LOCAL_KEY,
        "{:.2f}",
        f"{LOCAL.partition(': ')[2]}, and its inputs are float; higher is better. A low value "
        "is a cause of loss",
    ),
    Column(
        "accumulated SQNR, dB",
        "accumulated_sqnr_db",
        "{:.2f}",
        f"{ACCUMULATED.partition(': ')[2]}; higher is better. A low value may come from the "
        "layers before",
    ),
    Column(
        "clipped, %",
        "clipped",
        "{:.3g}",
        "share of values beyond the range of codes; lower is better",
        100.0,
    ),
    Column(
        "codes used, %",
        "codes_used",
        "{:.0f}",
        "share of the codes that occur; higher is better",
        100.0,
    ),
    Column("size, kB", "bytes", "{:.1f}", "of codes and scales; lower is better", 1e-3),
)


def layer_columns(content: JsonMapping) -> list[Column]:
    """Return the columns that have a figure for some tensor."""
    rows = content["layers"]
    return [column for column in _COLUMNS if any(column.value(row) is not None for row in rows)]


def layers_legend(content: JsonMapping) -> dict[str, str]:
    """Return what the columns mean, by title."""
    legend = {}
    for column in layer_columns(content):
        legend[column.title] = column.meaning
        if column.is_local:
            legend[column.title] += f". Marked as {LOW} or {POOR}: {_marks(content)}"
    return legend


def _marks(content: JsonMapping) -> str:
    """Return for the widths in the table the bounds below which rows are marked."""
    widths_by_bounds: dict[Bounds, set[int]] = {}
    for row in content["layers"]:
        if not is_lossless(content, row):
            bits = row.get("bits", 8)
            widths_by_bounds.setdefault(bounds_of(bits), set()).add(bits)
    return "; ".join(
        f"below {bounds.low_db:g} or {bounds.poor_db:g} dB where values have "
        f"{', '.join(map(str, sorted(widths)))} bits"
        for bounds, widths in widths_by_bounds.items()
    )


if TYPE_CHECKING:
    from jinja2 import Environment

SECTIONS = {
    "outputs": "Outputs",
    "exports": "Exported files",
    "layers": "Layers by damage",
    "depth": "Error along the network",
    "activations": "Activations: values and ranges",
    "weights": "Weights: ranges of channels",
    "data": "Is the calibration set enough?",
    "coverage": "Coverage",
    "algorithms": "What algorithms gained",
    "sensitivity": "Sensitivity and size",
    "config": "Config",
    "reproduce": "How to reproduce",
}
"""The titles of the sections in the order of the page. A key is the name of the template, and
of the link to the section.
"""
_MAX_DRAWN = 40
"""The most tensors whose curves over batches are drawn. They are those that become stable
last.
"""


def page(content: JsonMapping) -> str:
    """Return the whole file. A section that has nothing to show is left out."""
    environment = _environment()
    parts = []
    for name, title in SECTIONS.items():
        section = environment.get_template(f"sections/{name}.html")
        text = section.render(content=content).strip()
        if text:
            parts.append((name, title, Markup(text)))
    return _rendered("page.html", content, parts=parts)


def diff_page(content: JsonMapping) -> str:
    """Return a file that shows the difference of two results of one model.

    Args:
        content: the model, the names of both results, the texts of both tables, and the figures
            that are worse.
    """
    return _rendered("diff.html", content)


def _rendered(template: str, content: JsonMapping, **values: Any) -> str:
    """Return a whole file, with style and script."""
    html = (
        _environment()
        .get_template(template)
        .render(
            content=content,
            style=Markup(page_file("drawing.css") + page_file("page.css")),
            script=Markup(page_file("page.js")),
            **values,
        )
    )
    return html + "\n"


@cache
def _environment() -> Environment:
    """Return the environment of the templates, with the functions that they call."""
    # Imported here, as it takes a tenth of a second
    from jinja2 import Environment, PackageLoader, pass_context

    environment = Environment(
        loader=PackageLoader("quantizer.report.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "module_path": pass_context(_module_path),
        "number": number,
        "percent": _percent,
        "severity": severity,
        "short_names": pass_context(_with_short_names),
        "with_code": with_code,
        "error_share": error_share,
        "value_text": value_text,
    }
    environment.tests["still_changes"] = still_changes
    environment.globals |= {
        "figures": figures,
        "sections": sys.modules[__name__],
        "summary": summary,
        "layer_columns": layer_columns,
        "layers_legend": layers_legend,
        "rows_in_order": rows_in_order,
        "format_text": format_text,
        "try_next": try_next,
        "usual_specs": usual_specs,
        "usual_text": usual_text,
        "drawn_at_most": _MAX_DRAWN,
    }
    return environment


def _module_path(context: JsonMapping, layer: str) -> str:
    return layer_name(context["content"], layer)


def _breakable(path: str) -> Markup:
    """Return the path of a module, which a browser may break behind its dots."""
    return Markup(fragment(path).replace(".", ".<wbr>"))


def _with_short_names(context: JsonMapping, text: str) -> str:
    """Return a sentence with the module paths of layers instead of their exact names."""
    return TableView(context["content"]["paths"]).text(text)


def _percent(share: Any) -> float | None:
    """Return a share in percent; None for what is missing or not measured."""
    return 100.0 * share if isinstance(share, (int, float)) else None
