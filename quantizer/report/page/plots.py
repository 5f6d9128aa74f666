"""Write the drawings of a report as files, and what it holds for TensorBoard."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizer.config.json_types import JsonMapping
from quantizer.errors import ResultError, UsageError
from quantizer.installation import pip_line
from quantizer.printable import Markup
from quantizer.report.page.figures import (
    channels,
    histogram,
    limits_by_batches,
    page_file,
    sqnr_by_batches,
    sqnr_by_depth,
    sqnr_by_size,
)
from quantizer.report.rows import layer_name, rows_in_order, tensor_name
from quantizer.storage.files import write_bytes
from quantizer.storage.replacing import require_writable


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
