"""Draw the figures of a report from the content of report.json, for the page, for files and for
notebooks.
"""

import re
from collections.abc import Iterator
from importlib import resources

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.wording import counted, first_names
from quantizer.report.html import Markup
from quantizer.report.page import charts
from quantizer.report.page.charts import DrawnRange, Point, Series
from quantizer.report.rows import rows_in_order, tensor_name

_LEAST = "value of the least code"
_GREATEST = "value of the greatest code"
LOCAL = "local: only this tensor is quantized"
ACCUMULATED = "accumulated: all tensors up to here are quantized"
_SQNR_AXIS = "↑ SQNR in dB; higher is better"
_MAX_NAMES = 3
_BATCHES_AXIS = "number of calibration batches →"


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
    series = [Series(LOCAL, local, "second"), Series(ACCUMULATED, accumulated, "first")]
    axis_names = ("tensors in the order of execution →", _SQNR_AXIS)
    return charts.draw_lines(series, names, "dB", title="SQNR by depth", axis_names=axis_names)


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
    names = ("each weight with its best width, predicted", "one width for all weights")
    title = "Output SQNR by size of the weights"
    axis_names = ("size of all weights in MB →", _SQNR_AXIS)
    return charts.draw_curve(mixed, uniform, names, title=title, axis_names=axis_names)


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
    methods_by_range = _methods_by_range(row)
    same = methods_by_range.pop((least, greatest), [])
    chosen = "chosen, from the least to the greatest code"
    if same:
        chosen = f"chosen, as {first_names(same, _MAX_NAMES)}"
    ranges = [DrawnRange(least, greatest, chosen, "limit")]
    for ends, methods in methods_by_range.items():
        ranges.append(DrawnRange(*ends, first_names(methods, _MAX_NAMES)))
    title = f"Values of {tensor_name(content, row)}"
    return charts.draw_histogram(bins["counts"], low, high, ranges, title=title)


def _methods_by_range(row: JsonMapping) -> dict[tuple[float, float], list[str]]:
    """Return the methods that give the same limits, by these limits."""
    methods: dict[tuple[float, float], list[str]] = {}
    for method, (least, greatest) in row["methods"].items():
        methods.setdefault((least, greatest), []).append(method)
    return methods


def channels(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the range of each channel of a weight, or None for another tensor."""
    if "channels" not in row:
        return None
    ranges = row["channels"]
    title = f"Channels: {tensor_name(content, row)}"
    return charts.draw_strip(ranges, ranges["count"], title=title)


def limits_by_batches(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the ends of the range of an activation by the number of batches, or None if they
    were not observed.
    """
    if "batches" not in row:
        return None
    lows, highs = zip(*row["batches"]["limits"], strict=True)
    series = [Series(_LEAST, lows, "second"), Series(_GREATEST, highs, "first")]
    title = f"Limits by batches: {tensor_name(content, row)}"
    return _draw_by_batches(row, series, "↑ value", title=title)


def sqnr_by_batches(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the SQNR of all values by the number of batches that the range comes from, or None
    if it was not observed.
    """
    if "batches" not in row:
        return None
    series = Series("local SQNR on all values, in dB", row["batches"]["sqnr_db"])
    title = f"SQNR by batches: {tensor_name(content, row)}"
    return _draw_by_batches(row, [series], _SQNR_AXIS, title=title)


def _draw_by_batches(
    row: JsonMapping, series: list[Series], y_name: str, *, title: str
) -> Markup:
    counts = row["batches"]["counts"]
    names = [counted(count, "batch") for count in counts]
    return charts.draw_lines(
        series,
        names,
        "",
        title=title,
        height=100,
        has_points=False,
        axis_names=(_BATCHES_AXIS, y_name),
        positions=counts,
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
    # Only the script of the page reads them
    head = re.sub(r' data-\w+="[^"]*"', "", head)
    paper = f'<rect width="{width}" height="{height}" fill="{colours["back"]}"/>'
    sizes = (
        f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif"'
    )
    return f"{head} {sizes}><style>{style}</style>{paper}{body}\n"


def page_file(name: str) -> str:
    """Return the text of a file in this folder."""
    file = resources.files("quantizer.report.page").joinpath(name)
    return file.read_text(encoding="utf-8")
