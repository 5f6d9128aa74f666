"""The drawings of a report, each from the content of report.json: for the page, for files, for
notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

from quantizer.report.page import charts
from quantizer.report.page.charts import Mark, Point, Series
from quantizer.report.page.html import Markup
from quantizer.report.page.rows import Json, in_order, tensor_name

ENDS = (("least code", "second"), ("greatest code", "first"))
"""Of a range: its lower and its upper limit."""


def figures(content: Json) -> Iterator[tuple[str, Markup]]:
    """Every drawing with a name that says what it is of, unique but for characters that a
    file's name has not.
    """
    if (drawn := depth(content)) is not None:
        yield "sqnr by depth", drawn
    if (drawn := size_curve(content)) is not None:
        yield "sqnr by size", drawn
    for row in in_order(content):
        drawings = {
            "values": histogram,
            "channels": channels,
            "limits by batches": limits,
            "sqnr by batches": quality,
        }
        for what, draw in drawings.items():
            if (drawn := draw(content, row)) is not None:
                yield f"{what} {row['order']:03} {tensor_name(content, row)}", drawn


def depth(content: Json) -> Markup | None:
    """SQNR of activations in the order of execution."""
    rows = measured(content)
    series = (
        Series("this tensor alone", [row["local_sqnr_db"] for row in rows], "second"),
        Series(
            "the whole network up to here",
            [row["accumulated_sqnr_db"] for row in rows],
            "first",
        ),
    )
    names = [tensor_name(content, row) for row in rows]
    return charts.lines(series, names, "dB", title="SQNR by depth") if rows else None


def size_curve(content: Json) -> Markup | None:
    """Output SQNR against the size of the weights: the best mixed widths, and single widths for
    all.
    """
    found = content.get("analysis") or {}
    mixed = [
        _choice(each, "mixed")
        for each in found.get("curve", ())
        if each["predicted_db"] is not None
    ]
    single = found.get("uniform", {}).items()
    uniform = [
        _choice(each, f"{width} for all")
        for width, each in single
        if each["predicted_db"] is not None
    ]
    if len(mixed) < 2:
        return None
    names = ("mixed widths, predicted", "one width for all")
    return charts.curve(mixed, uniform, names, title="Output SQNR by size of the weights")


def _choice(found: Json, what: str) -> Point:
    size, ratio = found["weight_bytes"] / 1e6, found["predicted_db"]
    return Point(size, ratio, f"{what}: {size:.3g} MB, {ratio:.1f} dB")


def measured(content: Json) -> list[Json]:
    """The tensors that a test has compared, in the order of execution; of inputs little is
    lost, or nothing.
    """
    return [
        row
        for row in in_order(content)
        if row["accumulated_sqnr_db"] is not None and row["op"] != "input"
    ]


def histogram(content: Json, row: Json) -> Markup | None:
    """The values of an activation, the range chosen, and those of other methods."""
    if "histogram" not in row:
        return None
    drawn = row["histogram"]
    low, high = drawn["low"], drawn["high"]
    marks = [
        Mark(limit, side, "limit") for limit, (side, _) in zip(row["limits"], ENDS, strict=True)
    ]
    for name, ends in row["methods"].items():
        marks += [Mark(end, name) for end in ends if low < end < high]
    return charts.histogram(
        drawn["counts"], low, high, marks, title=f"Values of {tensor_name(content, row)}"
    )


def channels(content: Json, row: Json) -> Markup | None:
    """The range of each channel of a weight."""
    if "channels" not in row:
        return None
    return charts.strip(
        row["channels"]["low"],
        row["channels"]["high"],
        title=f"Channels: {tensor_name(content, row)}",
    )


def limits(content: Json, row: Json) -> Markup | None:
    """Where the range of an activation ends after so many batches."""
    if "batches" not in row:
        return None
    lines = zip(ENDS, zip(*row["batches"]["limits"], strict=True), strict=True)
    ends = [Series(label, values, kind) for (label, kind), values in lines]
    return charts.lines(
        ends,
        _batches(row),
        "",
        title=f"Limits by batches: {tensor_name(content, row)}",
        height=90,
        has_points=False,
    )


def quality(content: Json, row: Json) -> Markup | None:
    """What the range after so many batches does to all values."""
    if "batches" not in row:
        return None
    series = Series("SQNR on all values, dB", row["batches"]["sqnr_db"])
    return charts.lines(
        [series],
        _batches(row),
        "dB",
        title=f"SQNR by batches: {tensor_name(content, row)}",
        height=60,
        has_points=False,
    )


def _batches(row: Json) -> list[str]:
    return [f"{count} batches" for count in row["batches"]["counts"]]


def styles() -> str:
    """The rules for drawings, with colours for light and for dark."""
    return (
        resources.files("quantizer.report.page")
        .joinpath("drawing.css")
        .read_text(encoding="utf-8")
    )


def standalone(drawing: Markup) -> str:
    """A drawing as a file of its own, in the colours for light: SVG 1.1 without variables,
    which few programs read.
    """
    light, _, rules = styles().partition("@media")
    rules = rules.partition("\n}\n")[2].replace("svg ", "")
    colours = dict(re.findall(r"--(\w+): (#\w+);", light))
    style = re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[0]
    head, _, body = drawing.partition(">")
    paper = f'<rect width="{width}" height="{height}" fill="{colours["back"]}"/>'
    sizes = (
        f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif"'
    )
    return f"{head} {sizes}><style>{style}</style>{paper}{body}\n"
