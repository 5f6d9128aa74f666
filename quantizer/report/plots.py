"""The drawings of a report as files, and its figures for TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantizer.errors import ResultError, UsageError, pip_line
from quantizer.report.page.figures import figures, standalone
from quantizer.report.page.rows import in_order, name_of
from quantizer.storage.atomic_write import remove_left_over
from quantizer.storage.files import write_bytes

PIXELS = 2
"""Of a PNG for one unit of a drawing."""


def _svg(drawing: str) -> bytes:
    return drawing.encode()


def _png(drawing: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise UsageError(
            "PNG needs resvg-py", help=f"{pip_line('plots')}, or write SVG"
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=drawing, zoom=PIXELS))


KINDS: Mapping[str, Callable[[str], bytes]] = {"svg": _svg, "png": _png}
"""Of files, and what makes their content."""


def write_plots(values: Mapping[str, Any], folder: Path, kind: str = "svg") -> list[Path]:
    """Write each drawing of report.json's values into a folder, as .svg or, with the extra
    "plots", as .png.

    Raises:
        UsageError: there is no such kind, or its package is missing.
        ResultError: a file cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(
            f"there are no plots of kind {kind!r}", help=f"known are {', '.join(KINDS)}"
        )
    written = []
    remove_left_over(folder)
    for name, drawing in figures(dict(values)):
        file = re.sub(r"[^\w.-]+", "_", name)
        written.append(folder / f"{file}.{kind}")
        write_bytes(written[-1], KINDS[kind](standalone(drawing)))
    return written


def write_events(values: Mapping[str, Any], folder: Path) -> None:
    """Write what TensorBoard shows: metrics, SQNR by depth, the histogram of each activation,
    and the config.

    Raises:
        UsageError: the package tensorboard is missing.
        ResultError: the folder cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("this needs tensorboard", help=pip_line("plots")) from None
    content = dict(values)
    try:
        with SummaryWriter(str(folder)) as writer:
            _add(writer, content)
    except OSError as error:
        raise ResultError(f"{folder} cannot be written: {error.strerror}") from error


def _add(writer: Any, content: dict[str, Any]) -> None:
    for name, value in content["metrics"].items():
        if value is not None:
            writer.add_scalar(f"metric/{name}", value)
    for row in in_order(content):
        where = f"{name_of(content, row['layer'])}/{row['tensor']}"
        for figure in ("local_sqnr_db", "accumulated_sqnr_db"):
            if row[figure] is not None:
                writer.add_scalar(f"depth/{figure}", row[figure], row["order"])
                writer.add_scalar(f"{figure}/{where}", row[figure])
        if "histogram" in row:
            _add_histogram(writer, f"values/{where}", row["histogram"])
    if content["config"]:
        writer.add_text("config", f"```\n{content['config']['text']}\n```")


def _add_histogram(writer: Any, name: str, drawn: dict[str, Any]) -> None:
    counts, low, high = drawn["counts"], drawn["low"], drawn["high"]
    width = (high - low) / len(counts)
    middles = [low + (at + 0.5) * width for at in range(len(counts))]
    writer.add_histogram_raw(
        name,
        min=low,
        max=high,
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(
            count * middle**2 for count, middle in zip(counts, middles, strict=True)
        ),
        bucket_limits=[low + (at + 1) * width for at in range(len(counts))],
        bucket_counts=counts,
    )
