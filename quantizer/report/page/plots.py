"""Write the drawings of a report to files, and its figures for TensorBoard."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantizer.config.json_types import JsonMapping
from quantizer.errors import ResultError, UsageError, pip_line
from quantizer.report.html import Markup
from quantizer.report.page.figures import figures, standalone
from quantizer.report.rows import layer_name, rows_in_order
from quantizer.storage.files import write_bytes
from quantizer.storage.replacing import require_writable

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
    counts = histogram["counts"]
    low = histogram["low"]
    high = histogram["high"]
    width = (high - low) / len(counts)
    sums = []
    square_sums = []
    limits = []
    for index, count in enumerate(counts):
        centre = low + (index + 0.5) * width
        sums.append(count * centre)
        square_sums.append(count * centre**2)
        limits.append(low + (index + 1) * width)
    writer.add_histogram_raw(
        name,
        min=low,
        max=high,
        num=sum(counts),
        sum=sum(sums),
        sum_squares=sum(square_sums),
        bucket_limits=limits,
        bucket_counts=counts,
    )
