"""Compute values for the templates of the page from the content of report.json."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.evaluation.output_warnings import NOTES
from quantizer.report.page.axes import number
from quantizer.report.page.figures import ACCUMULATED, LOCAL, measured_rows
from quantizer.report.rows import (
    LOW,
    POOR,
    Bounds,
    bounds_of,
    is_lossless,
    layer_name,
    tensor_name,
)

MAX_CLIPPED = 0.01
"""A tensor with a larger share of clipped values is listed under coverage."""
_LOCAL_KEY = "local_sqnr_db"
STEEP_DB = 3.0
"""A larger loss from one tensor to the next is mentioned below the drawing of SQNR by depth."""


def warned_outputs(content: JsonMapping) -> set[str]:
    """Return the outputs that a warning is about."""
    names: set[str] = set()
    for warning in content.get("warnings", ()):
        if warning["kind"] not in NOTES:
            names.add(warning["output"])
    return names


@dataclass(frozen=True)
class Fall:
    """The largest loss of accumulated SQNR from one tensor to the next.

    Args:
        loss_db: the loss.
        tensor: the name of the second tensor.
    """

    loss_db: float
    tensor: str


def steepest_fall(content: JsonMapping) -> Fall | None:
    """Return the largest loss of accumulated SQNR, or None if none is above `STEEP_DB`."""
    steepest = None
    largest_loss_db = STEEP_DB
    for before, after in itertools.pairwise(measured_rows(content)):
        loss_db = before["accumulated_sqnr_db"] - after["accumulated_sqnr_db"]
        if loss_db > largest_loss_db:
            largest_loss_db = loss_db
            steepest = Fall(loss_db, tensor_name(content, after))
    return steepest


@dataclass(frozen=True)
class RowsByLoss:
    """The tensors of a report, in its order.

    Attributes:
        damaged: those that lose something, or that no test has measured.
        lossless: the others.
    """

    damaged: list[JsonObject]
    lossless: list[JsonObject]


def rows_by_loss(content: JsonMapping) -> RowsByLoss:
    """Return the tensors with and those without loss."""
    rows = RowsByLoss([], [])
    for row in content["layers"]:
        if is_lossless(content, row):
            rows.lossless.append(row)
        else:
            rows.damaged.append(row)
    return rows


def error_share(sqnr_db: float | None) -> float | None:
    """Return the amplitude of the error in percent of that of the values.

    >>> error_share(20.0)
    10.0
    """
    if sqnr_db is None:
        return None
    amplitude: float = 10 ** (-sqnr_db / 20)
    return 100 * amplitude


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
    lines = []
    for row in rows:
        name = tensor_name(content, row)
        lines.append(f"{name}: {row['batches']['stable_after']}")
    return lines


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
    head = ", ".join(absent[:-1])
    return " or ".join(filter(None, [head, *absent[-1:]]))


def remarks(content: JsonMapping) -> list[str]:
    """Return the notes of algorithms about single layers."""
    texts = []
    for remark in content["algorithms"]["remarks"]:
        layer = layer_name(content, remark["layer"])
        texts.append(f"{layer}: {remark['text']}")
    return texts


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
    columns = []
    for column in _COLUMNS:
        if any(column.value(row) is not None for row in content["layers"]):
            columns.append(column)
    return columns


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
    phrases = []
    for bounds, widths in widths_by_bounds.items():
        names = ", ".join(map(str, sorted(widths)))
        phrases.append(
            f"below {bounds.low_db:g} or {bounds.poor_db:g} dB where values have {names} bits"
        )
    return "; ".join(phrases)
