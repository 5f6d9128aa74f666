"""Shows the result of a mode or of a command: lines, and tables with few rows by default, for
readers of terminals and logs alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import as_typed
from quantizer.cli.terminal.screen import screen, starts_of_lines
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import Selector
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.names import path_names
from quantizer.plan.model import Plan
from quantizer.printable import json_text, one_line
from quantizer.report.rows import FAIL, NOT_JUDGED, PASS
from quantizer.report.tables import layer_table
from quantizer.report.view import TableView

if TYPE_CHECKING:
    from quantizer.export.agreement import Verification

_LOG_WIDTH = 100
"""Columns of tables in pipes and files."""
_UNLIMITED = 1000
_COLOR_SYSTEMS = {True: "standard", False: None, None: "auto"}
"""Rich's color system for colored output, for output without colors, and for either."""
_STYLES = {PASS: "bold green", FAIL: "bold red", NOT_JUDGED: "bold"}
_DEFAULT_ROWS = 15
"""Rows of a table of layers without `--top`."""


@dataclass(frozen=True)
class Outcome:
    """The result of a mode.

    Attributes:
        metrics: those that gates may use.
        content: printed with --json.
        shown: printed otherwise.
        error: raised after everything is printed.
        report: the values of report.json, if there is one.
        plan: of a calibration.
        deployed: each written file with its comparison.
        exports: the same files, as report.json has them.
    """

    metrics: Mapping[str, float]
    content: JsonMapping
    shown: Sequence[RenderableType] = field(default=())
    error: Exception | None = None
    report: JsonObject = field(default_factory=dict)
    plan: Plan | None = None
    deployed: Mapping[Path, Verification] = field(default_factory=dict)
    exports: Sequence[JsonMapping] = ()


def metric_lines(metrics: dict[str, float]) -> list[RenderableType]:
    """Return a line for each metric."""
    return [f"{name} {value:.6g}" for name, value in metrics.items()]


def console(*, stderr: bool = False, exact: bool = False) -> Console:
    """Return a console.

    In a pipe or file, lines of tables have at most 100 columns. With exact names they are not
    limited, as no name of a layer must be broken there.

    Args:
        stderr: whether it prints on standard error.
        exact: whether tables show exact names.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None
    if not stream.isatty():
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() else 0
        width = width or (_UNLIMITED if exact else _LOG_WIDTH)
    is_colored = screen().is_colored
    system: Any = _COLOR_SYSTEMS[is_colored]
    no_color = False if is_colored else None
    return Console(
        stderr=stderr,
        width=width,
        highlight=False,
        soft_wrap=False,
        color_system=system,
        no_color=no_color,
    )


def show(outcome: Outcome, options: Options) -> None:
    """Print the result on stdout."""
    if options.json:
        print(as_typed(json_text(outcome.content)))
        return
    stdout = console(exact=options.names == "exact")
    for item in outcome.shown:
        if isinstance(item, str):
            print_line(item, stdout)
        else:
            print_table(item, stdout)


def print_table(table: RenderableType, stream: Console) -> None:
    """Print a table, unless `--quiet` is given."""
    if not screen().quiet:
        stream.print(table)


def print_verdict(lines: Iterable[str]) -> None:
    """Print a verdict on stdout, with PASS or FAIL in color."""
    stream = console()
    for line in lines:
        text = Text(one_line(as_typed(line)))
        text.stylize(_STYLES.get(line.partition(":")[0], ""))
        print_line(text, stream)


def print_line(line: str | Text, stream: Console) -> None:
    """Print one line of text. A terminal breaks it between words, never within a path."""
    if isinstance(line, str):
        line = Text(one_line(as_typed(line)))
    starts = []
    if stream.is_terminal:
        starts = starts_of_lines(line.plain, stream.width)
    for part in line.divide(starts):
        part.rstrip()
        stream.print(part, soft_wrap=True)


def table_view(options: Options, graph: Graph) -> TableView:
    """Return the view of a graph's layers that `--names` and `--top` ask for."""
    return view_of(options, path_names(graph))


def view_of(options: Options, paths: Mapping[str, str]) -> TableView:
    """Return the view that `--names` and `--top` ask for; `paths` are module paths by name."""
    rows: int | None = _DEFAULT_ROWS
    if isinstance(options.top, int):
        rows = options.top
    elif options.top == "all":
        rows = None
    if options.names == "exact":
        paths = {}
    return TableView(paths, rows)


def filtered_view(options: Options, graph: Graph, original: Graph) -> TableView:
    """Return the view of a graph's layers, only those of `--filter` if it is given.

    Raises:
        UsageError: `--filter` matches no layer.
    """
    view = table_view(options, graph)
    if options.filter is None:
        return replace(view, remedy=f"{view.remedy}, --filter GLOB those of some layers")
    from quantizer.plan.match import match
    from quantizer.plan.selected import advice

    selector = Selector("name", options.filter)
    layers = set(match(selector, graph, original).layers)
    for name, path in path_names(graph).items():
        if fnmatchcase(path, options.filter):
            layers.add(name)
    if not layers:
        raise UsageError(
            f"--filter {options.filter!r} matches no layer", help=advice(selector, original)
        )
    top = view.top if options.top else None
    return replace(view, layers=frozenset(layers), top=top)


def show_layers(
    options: Options,
    graph: Graph,
    tensors: Iterable[tuple[str, str]],
    floats: Mapping[str, str],
) -> None:
    """Print the table of all layers, for `--inspect`."""
    view = table_view(options, graph)
    table = layer_table(graph, tensors, floats, view)
    print_table(table, console(exact=view.is_exact))


def annotate(options: Options, not_met: Sequence[str], report: JsonObject) -> None:
    """In GitHub Actions, annotate the config with the gates that do not hold, or without any
    with the warnings of a test.

    Args:
        options: of the run.
        not_met: the gates.
        report: the values of report.json; none in float mode.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    # Only GitHub Actions need it
    from quantizer.cli.terminal import annotations

    if not_met:
        annotations.annotate(options, not_met, report)
    else:
        annotations.annotate_warnings(options, report)


def append_summary(report: JsonObject, gates: Sequence[str]) -> None:
    """Append the figures and gates of a test to the summary of a job of GitHub Actions, if
    there is one.
    """
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path and "metrics" in report:
        # As in `annotate`
        from quantizer.cli.terminal import annotations

        annotations.append_summary(path, report, gates)
