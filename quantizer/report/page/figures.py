"""Draw the figures of a report from the content of report.json, for the page and for notebooks,
and write them as files and for TensorBoard.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.wording import counted, first_names
from quantizer.errors import ResultError, UsageError, pip_line
from quantizer.report.html import Markup
from quantizer.report.page import charts
from quantizer.report.page.charts import DrawnRange, Point, Series
from quantizer.report.rows import layer_name, rows_in_order, tensor_name
from quantizer.storage.files import write_bytes
from quantizer.storage.replacing import require_writable

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
    drawings = {"sqnr by depth": sqnr_by_depth(content), "sqnr by size": sqnr_by_size(content)}
    for row in rows_in_order(content):
        name = f"{row['order']:03} {tensor_name(content, row)}"
        drawings[f"values {name}"] = histogram(content, row)
        drawings[f"channels {name}"] = channels(content, row)
        drawings[f"limits by batches {name}"] = limits_by_batches(content, row)
        drawings[f"sqnr by batches {name}"] = sqnr_by_batches(content, row)
    for name, drawing in drawings.items():
        if drawing is not None:
            yield name, drawing


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
    chosen = "chosen, from the least to the greatest code"
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


_PNG_ZOOM = 2
"""Pixels of a PNG per unit of a drawing."""


def _svg(drawing: str) -> bytes:
    return drawing.encode()


def _png(drawing: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        advice = f"{pip_line('plots')}, or write SVG"
        raise UsageError("PNG needs resvg-py", help=advice) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=drawing, zoom=_PNG_ZOOM))


PLOT_WRITERS: Mapping[str, Callable[[str], bytes]] = {"svg": _svg, "png": _png}
"""The functions that convert an SVG drawing to the content of a file, by the suffix of the
file.
"""


def write_plots(values: JsonMapping, folder: Path, kind: str = "svg") -> list[Path]:
    """Write each drawing of a report to a file, and return the files.

    Args:
        values: the content of report.json.
        folder: the folder to write to.
        kind: "svg", or "png", which needs the extra "plots".

    Raises:
        UsageError: there is no such kind, its package is missing, or a file exists.
        ResultError: a file cannot be written.
    """
    if kind not in PLOT_WRITERS:
        raise UsageError(
            f"there are no plots of kind {kind!r}", help=f"known are {', '.join(PLOT_WRITERS)}"
        )
    to_bytes = PLOT_WRITERS[kind]
    drawings: dict[Path, Markup] = {}
    for name, drawing in figures(values):
        stem = re.sub(r"[^\w.-]+", "_", name)
        file = folder / f"{stem}.{kind}"
        require_writable(file)
        drawings[file] = drawing
    for file in drawings:
        write_bytes(file, to_bytes(standalone(drawings[file])))
    return list(drawings)


def write_events(values: JsonMapping, folder: Path) -> None:
    """Write an event file of TensorBoard: metrics, SQNR by depth, the histogram of each
    activation, and the config.

    Args:
        values: the content of report.json.
        folder: the folder to write to.

    Raises:
        UsageError: the package tensorboard is missing.
        ResultError: the folder cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("this needs tensorboard", help=pip_line("plots")) from None
    try:
        with SummaryWriter(str(folder)) as writer:
            _add_report(writer, values)
    except OSError as error:
        raise ResultError(f"{folder} cannot be written: {error.strerror}") from error


def _add_report(writer: Any, content: JsonMapping) -> None:
    for name, value in content["metrics"].items():
        if value is not None:
            writer.add_scalar(f"metric/{name}", value)
    for row in rows_in_order(content):
        layer = layer_name(content, row["layer"])
        tensor = f"{layer}/{row['tensor']}"
        for figure in ("local_sqnr_db", "accumulated_sqnr_db"):
            sqnr_db = row[figure]
            if sqnr_db is not None:
                writer.add_scalar(f"depth/{figure}", sqnr_db, row["order"])
                writer.add_scalar(f"{figure}/{tensor}", sqnr_db)
        if "histogram" in row:
            _add_histogram(writer, f"values/{tensor}", row["histogram"])
    if content["config"]:
        writer.add_text("config", f"```\n{content['config']['text']}\n```")


def _add_histogram(writer: Any, name: str, histogram: JsonMapping) -> None:
    """Write a histogram of a tensor for TensorBoard."""
    counts, low, high = histogram["counts"], histogram["low"], histogram["high"]
    width = (high - low) / len(counts)
    centres = [low + (index + 0.5) * width for index in range(len(counts))]
    sums = [count * centre for count, centre in zip(counts, centres, strict=True)]
    square_sums = [count * centre**2 for count, centre in zip(counts, centres, strict=True)]
    writer.add_histogram_raw(
        name,
        min=low,
        max=high,
        num=sum(counts),
        sum=sum(sums),
        sum_squares=sum(square_sums),
        bucket_limits=[low + (index + 1) * width for index in range(len(counts))],
        bucket_counts=counts,
    )
