"""Draw the figures of a report from the content of report.json."""

from collections.abc import Iterable
from importlib import resources

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.wording import counted, first_names
from quantizer.printable import Markup
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


def sqnr_by_depth(content: JsonMapping) -> Markup | None:
    """Return the SQNR of activations in the order of execution, or None if none was
    measured.
    """
    rows = measured_rows(content)
    if not rows:
        return None
    names = [tensor_name(content, row) for row in rows]
    series = [
        Series(LOCAL, [row["local_sqnr_db"] for row in rows], "second"),
        Series(ACCUMULATED, [row["accumulated_sqnr_db"] for row in rows], "first"),
    ]
    axis_names = ("tensors in the order of execution →", _SQNR_AXIS)
    return charts.draw_lines(series, names, "dB", title="SQNR by depth", axis_names=axis_names)


def measured_rows(content: JsonMapping) -> list[JsonObject]:
    """Return the tensors that a test has compared, in the order of execution.

    Inputs are left out, as they lose little or nothing.
    """
    return [
        row
        for row in rows_in_order(content)
        if row["accumulated_sqnr_db"] is not None and row["op"] != "input"
    ]


def histogram(content: JsonMapping, row: JsonMapping) -> Markup | None:
    """Return the histogram of an activation, with the ends of its range and of the ranges of
    other methods. Return None for a tensor without a histogram.
    """
    if "histogram" not in row:
        return None
    bins = row["histogram"]
    least, greatest = row["limits"]
    methods_by_range: dict[tuple[float, float], list[str]] = {}
    for method, ends in row["methods"].items():
        methods_by_range.setdefault(tuple(ends), []).append(method)
    same = methods_by_range.pop((least, greatest), [])
    chosen = "chosen"
    if same:
        chosen = f"chosen, as {first_names(same, _MAX_NAMES)}"
    ranges = [DrawnRange(least, greatest, chosen, "limit")]
    for ends, methods in methods_by_range.items():
        ranges.append(DrawnRange(*ends, first_names(methods, _MAX_NAMES)))
    title = f"Values of {tensor_name(content, row)}"
    return charts.draw_histogram(bins["counts"], bins["low"], bins["high"], ranges, title=title)


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
    return charts.draw_lines(
        series,
        [counted(count, "batch") for count in counts],
        "",
        title=title,
        height=100,
        has_points=False,
        axis_names=(_BATCHES_AXIS, y_name),
        positions=counts,
    )


def page_file(name: str) -> str:
    """Return the text of a file in this folder."""
    file = resources.files("quantizer.report.page").joinpath(name)
    return file.read_text(encoding="utf-8")


def sqnr_by_size(content: JsonMapping) -> Markup | None:
    """Return the output SQNR by the size of the weights, or None without an analysis.

    The line joins the best mixed widths. Single points have the same width for all weights.
    """
    analysis = content.get("analysis") or {}
    mixed = _choice_points(("mixed", choice) for choice in analysis.get("curve", ()))
    widths = analysis.get("uniform", {}).items()
    uniform = _choice_points((f"{width} for all", choice) for width, choice in widths)
    if len(mixed) < 2:
        return None
    names = ("each weight with its best width, predicted", "one width for all weights")
    title = "Output SQNR by size of the weights"
    axis_names = ("size of all weights in MB →", _SQNR_AXIS)
    return charts.draw_curve(mixed, uniform, names, title=title, axis_names=axis_names)


def _choice_points(choices: Iterable[tuple[str, JsonMapping]]) -> list[Point]:
    points = []
    for what, choice in choices:
        megabytes, sqnr_db = choice["weight_bytes"] / 1e6, choice["predicted_db"]
        if sqnr_db is not None:
            label = f"{what}: {megabytes:.3g} MB, {sqnr_db:.1f} dB"
            points.append(Point(megabytes, sqnr_db, label))
    return points
