"""Draw the figures of a report from the content of report.json, for the page, for files and for
notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.report.page import charts
from quantizer.report.page.charts import Mark, Point, Series
from quantizer.report.page.html import Markup, page_file
from quantizer.report.page.rows import rows_in_order, tensor_name

_LEAST = "least code"
_GREATEST = "greatest code"


def figures(content: JsonMapping) -> Iterator[tuple[str, Markup]]:
    """Yield (name, drawing) of all drawings of a report.

    Names are unique, but may have characters that are not allowed in file names.
    """
    drawing = sqnr_by_depth(content)
    if drawing is not None:
        yield "sqnr by depth", drawing
    drawing = sqnr_by_size(content)
    if drawing is not None:
        yield "sqnr by size", drawing
    for row in rows_in_order(content):
        drawings = {
            "values": histogram(content, row),
            "channels": channels(content, row),
            "limits by batches": limits_by_batches(content, row),
            "sqnr by batches": sqnr_by_batches(content, row),
        }
        for what, drawing in drawings.items():
            if drawing is not None:
                yield f"{what} {row['order']:03} {tensor_name(content, row)}", drawing


def sqnr_by_depth(content: JsonMapping) -> Markup | None:
    """Return the SQNR of activations in the order of execution, or None if none was
    measured.
    """
    names = []
    local = []
    accumulated = []
    for row in measured_rows(content):
        names.append(tensor_name(content, row))
        local.append(row["local_sqnr_db"])
        accumulated.append(row["accumulated_sqnr_db"])
    if not names:
        return None
    series = [
        Series("this tensor alone", local, "second"),
        Series("the whole network up to here", accumulated, "first"),
    ]
    return charts.draw_lines(series, names, "dB", title="SQNR by depth")


def sqnr_by_size(content: JsonMapping) -> Markup | None:
    """Return the output SQNR by the size of the weights, or None without an analysis.

    The line joins the best mixed widths. Single points have the same width for all weights.
    """
    analysis = content.get("analysis") or {}
    mixed = []
    for choice in analysis.get("curve", ()):
        if choice["predicted_db"] is not None:
            mixed.append(_choice_point(choice, "mixed"))
    uniform = []
    for width, choice in analysis.get("uniform", {}).items():
        if choice["predicted_db"] is not None:
            uniform.append(_choice_point(choice, f"{width} for all"))
    if len(mixed) < 2:
        return None
    names = ("mixed widths, predicted", "one width for all")
    title = "Output SQNR by size of the weights"
    return charts.draw_curve(mixed, uniform, names, title=title)


def _choice_point(choice: JsonMapping, what: str) -> Point:
    megabytes = choice["weight_bytes"] / 1e6
    sqnr_db = choice["predicted_db"]
    return Point(megabytes, sqnr_db, f"{what}: {megabytes:.3g} MB, {sqnr_db:.1f} dB")


def measured_rows(content: JsonMapping) -> list[JsonObject]:
    """Return the tensors that a test has compared, in the order of execution.

    Inputs are left out, as they lose little or nothing.
    """
    rows = []
    for row in rows_in_order(content):
        if row["accumulated_sqnr_db"] is not None and row["op"] != "input":
            rows.append(row)
    return rows


def histogram(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the histogram of an activation, with the ends of its range and of the ranges of
    other methods. Return None for a tensor without a histogram.
    """
    if "histogram" not in row:
        return None
    bins = row["histogram"]
    low = bins["low"]
    high = bins["high"]
    least, greatest = row["limits"]
    marks = [Mark(least, _LEAST, "limit"), Mark(greatest, _GREATEST, "limit")]
    for method, ends in row["methods"].items():
        marks += [Mark(end, method) for end in ends if low < end < high]
    title = f"Values of {tensor_name(content, row)}"
    return charts.draw_histogram(bins["counts"], low, high, marks, title=title)


def channels(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the range of each channel of a weight, or None for another tensor."""
    if "channels" not in row:
        return None
    ranges = row["channels"]
    title = f"Channels: {tensor_name(content, row)}"
    return charts.draw_strip(ranges["low"], ranges["high"], title=title)


def limits_by_batches(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the ends of the range of an activation by the number of batches, or None if they
    were not observed.
    """
    if "batches" not in row:
        return None
    lows, highs = zip(*row["batches"]["limits"], strict=True)
    series = [Series(_LEAST, lows, "second"), Series(_GREATEST, highs, "first")]
    title = f"Limits by batches: {tensor_name(content, row)}"
    return _draw_by_batches(row, series, title=title, height=90)


def sqnr_by_batches(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the SQNR of all values by the number of batches that the range comes from, or None
    if it was not observed.
    """
    if "batches" not in row:
        return None
    series = Series("SQNR on all values, dB", row["batches"]["sqnr_db"])
    title = f"SQNR by batches: {tensor_name(content, row)}"
    return _draw_by_batches(row, [series], title=title, height=60)


def _draw_by_batches(
    row: JsonMapping,
    series: list[Series],
    *,
    title: str,
    height: int,
) -> Markup:
    names = [str(count) for count in row["batches"]["counts"]]
    return charts.draw_lines(
        series,
        names,
        "",
        title=title,
        height=height,
        has_points=False,
    )


def standalone(drawing: Markup) -> str:
    """Return a drawing as the content of an SVG file, in the colours of the light theme.

    Few programs know CSS variables, so they are replaced by their values.
    """
    # drawing.css has the variables of the light theme, then those of the dark theme in a block
    # `@media`, then the rules of drawings
    light, _, rules = page_file("drawing.css").partition("@media")
    rules = rules.partition("\n}\n")[2].replace("svg ", "")
    colours = dict(re.findall(r"--(\w+): (#\w+);", light))
    style = re.sub(r"var\(--(\w+)\)", lambda variable: colours[variable[1]], rules)
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[0]
    head, _, body = drawing.partition(">")
    paper = f'<rect width="{width}" height="{height}" fill="{colours["back"]}"/>'
    sizes = (
        f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif"'
    )
    return f"{head} {sizes}><style>{style}</style>{paper}{body}\n"
