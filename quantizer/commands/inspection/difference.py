"""Compare two calibrations, or two plans, of one model tensor by tensor. No network is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import write_output
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import view_of
from quantizer.cli.terminal.render import say, say_note
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.cli.traced_model import traced_model
from quantizer.commands.inspection.tensor_rows import (
    SQNR,
    differing_tensors,
    tensor_table,
    tensors_at_outputs,
)
from quantizer.comparison.output_figures import POOLED_FIGURE, ROWS_KEPT, WORST_SAMPLES
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.declarations import DROP, RATIO, RISE
from quantizer.errors import UsageError
from quantizer.graph.names import path_names
from quantizer.plan.model import Key, Plan
from quantizer.plan.size import weight_bytes
from quantizer.printable import json_text
from quantizer.report.content import shown_by_plugin
from quantizer.report.tables import figures_by_tensor, finite_or_none, number_text
from quantizer.report.view import TableRow, TableView
from quantizer.results.folder import REPORT_FILE, read_info
from quantizer.results.graph_file import read_graph
from quantizer.sources.directions import BY_NAME, Directions
from quantizer.tables import POOLED_METRICS

_SIZE = "weight_bytes"
"""The figure that no test is needed for."""
_DERIVED = ("_float", DROP, RISE, RATIO)
"""The ends of the names of figures that are computed from a metric."""
_NEGLIGIBLE = 1e-3
"""Figures may differ by this share because they were measured on different machines."""
_EQUAL_SIZES = 0.01
"""Sizes that differ by this share are called equal."""
_Pair = tuple[float | None, float | None]
"""The values of a figure on the first side and on the second."""


@dataclass(frozen=True)
class Side:
    """One of the two calibrations or plans.

    Attributes:
        model: the name of the model.
        tensors: by key, an entry with the "spec" as JSON. Calibrations also have scale, zero
            point and SQNRs.
        figures: the values of figures, by name.
        paths: the module path of each layer.
        metrics: the names of the figures that `evaluate` returns.
        directions: the declared directions of metrics.
        is_tested: whether test mode has measured it. Plans count as tested.
        judged_on: the samples that test mode has measured it on, as reports say it.
        at_output: for the input of a layer, the tensor where its value is made.
    """

    model: str
    tensors: Mapping[Key, JsonMapping]
    figures: Mapping[str, float | None]
    paths: Mapping[str, str]
    metrics: frozenset[str] = frozenset()
    directions: Directions = BY_NAME
    is_tested: bool = True
    judged_on: str = ""
    at_output: Mapping[Key, Key] = field(default_factory=dict)

    def without_test(self) -> Side:
        """Return the side without the figures that test mode measures."""
        tensors = {}
        for key, tensor in self.tensors.items():
            calibrated = dict(tensor)
            for name in SQNR:
                del calibrated[name]
            tensors[key] = calibrated
        figures = {_SIZE: self.figures[_SIZE]}
        return replace(self, tensors=tensors, figures=figures, is_tested=False)


@dataclass(frozen=True)
class Difference:
    """The tensors and the figures that differ between two sides.

    Attributes:
        rows: a row for each tensor that differs, with both values of each entry that differs.
        figures: both values of each figure that differs. A value is None if the side has none.
        worse: the names of figures that are worse on the second side.
        unknown: the names of figures of which it is not known whether less is better.
    """

    rows: list[JsonObject]
    figures: Mapping[str, _Pair]
    worse: list[str]
    unknown: list[str]

    def to_json(self) -> JsonObject:
        """Return the difference as JSON. Infinite figures are None."""
        figures = {}
        for name, values in self.figures.items():
            figures[name] = list(map(finite_or_none, values))
        return {
            "tensors": self.rows,
            "figures": figures,
            "worse": self.worse,
            "unknown": self.unknown,
        }


def side_of_folder(place: Path) -> Side:
    """Return the calibration in a result folder, with SQNRs if it was tested.

    Raises:
        ResultError: the folder is incomplete, or was changed.
    """
    opened = read_info(place)
    plan = opened.plan
    tested = opened.read_findings(REPORT_FILE)
    measured = figures_by_tensor(tested)
    tensors = {}
    for layer, roles in opened.entries.items():
        for role, entry in roles.items():
            key = (layer, role)
            tensor = {name: entry.get(name) for name in ("spec", "scale", "zero_point")}
            for name in SQNR:
                tensor[name] = measured.get(key, {}).get(name)
            tensors[key] = tensor
    graph_file = read_graph(opened)
    at_output: Mapping[Key, Key] = {}
    if graph_file is not None:
        graph = graph_file.stored.with_zeros(graph_file.constants)
        at_output = tensors_at_outputs(graph, tensors)
    figures = _figures(tested)
    figures[_SIZE] = plan["weight_bytes"]["quantized"]
    return Side(
        model=opened.header["model"],
        tensors=tensors,
        figures=figures,
        paths=plan["paths"],
        metrics=frozenset(tested.get("pairs", {})),
        directions=Directions.from_json(tested.get("lower_is_better", {})),
        is_tested=bool(tested.get("outputs")),
        judged_on=(tested.get("judged_on") or {}).get("text", ""),
        at_output=at_output,
    )


def _figures(tested: JsonMapping) -> dict[str, float | None]:
    """Return the figures of a test. If there are several outputs or parts, their figures are
    included.
    """
    figures: dict[str, float | None] = {}
    for name, value in tested.get("metrics", {}).items():
        # Its other name ends in DROP
        if not name.endswith(RISE):
            figures[name] = value
    outputs = tested.get("outputs", [])
    for figure in ("sqnr_db", WORST_SAMPLES):
        if figure in figures and figures[figure] is None:
            sqnrs = (_output_sqnr_db(row, figure) for row in outputs)
            measured = [sqnr_db for sqnr_db in sqnrs if sqnr_db is not None]
            figures[figure] = min(measured, default=None)
    if len(outputs) < 2:
        # They equal the figures of the only output
        for name in POOLED_METRICS:
            figures.pop(name, None)
        return figures
    if POOLED_FIGURE in figures and figures[POOLED_FIGURE] is None:
        figures[POOLED_FIGURE] = figures["sqnr_db"]
    for row in outputs:
        for figure, value in _output_figures(row):
            figures[f"{figure}[{row['name']}]"] = value
    return figures


def _output_figures(row: JsonMapping) -> Iterator[tuple[str, float | None]]:
    """Yield (name, value) of the figures of one output or part.

    Quantized floats are seldom equal, so the share of equal values is a figure only of outputs
    that are not floats.
    """
    if row["kind"] == "float":
        yield "sqnr_db", _output_sqnr_db(row)
        if row.get("samples"):
            yield WORST_SAMPLES, _output_sqnr_db(row, WORST_SAMPLES)
        yield "cosine", row["cosine"]
    elif row["kind"] != "empty":
        yield "equal_outputs", row["equal"]
    order = row.get("rows")
    if order is not None and order["rows"]:
        yield ROWS_KEPT, 1 - order["exchanged"] / order["rows"]


def _output_sqnr_db(row: JsonMapping, figure: str = "sqnr_db") -> float | None:
    """Return the SQNR of an output or part, or of its worst samples; None if it has none.

    report.json has null instead of infinity. Then the share of equal values shows the sign.
    """
    if figure == WORST_SAMPLES and not row.get("samples"):
        # It counts with all values
        figure = "sqnr_db"
    sqnr_db: float | None = row[figure]
    if sqnr_db is not None or row["kind"] != "float":
        return sqnr_db
    return math.inf if row["equal"] == 1 else -math.inf


def side_of_plan(plan: Plan, paths: Mapping[str, str]) -> Side:
    """Return a plan as a side of a comparison.

    Args:
        plan: of a config for the model.
        paths: the module path of each layer.
    """
    tensors = {key: {"spec": tensor.spec.to_json()} for key, tensor in plan.tensors.items()}
    _, quantized_bytes = weight_bytes(plan)
    at_output = tensors_at_outputs(plan.graph, tensors)
    figures = {_SIZE: quantized_bytes}
    return Side(plan.graph.model, tensors, figures, paths, at_output=at_output)


def compare_sides(first: Side, second: Side) -> Difference:
    """Return the tensors and figures that differ, in the order of the first side."""
    at_output = {**first.at_output, **second.at_output}
    rows = list(differing_tensors(first.tensors, second.tensors, at_output))
    figures = {}
    for name in {**first.figures, **second.figures}:
        before = first.figures.get(name)
        after = second.figures.get(name)
        if before != after:
            figures[name] = (before, after)
    metrics = first.metrics | second.metrics
    directions = second.directions.with_fallback(first.directions)
    result = Difference(rows, figures, worse=[], unknown=[])
    for name, values in figures.items():
        # The metric that a figure is computed from is compared itself
        bases = {name.removesuffix(suffix) for suffix in _DERIVED} - {name}
        if not metrics.isdisjoint(bases):
            continue
        is_lower_better = directions.of_figure(name, metrics)
        if is_lower_better is None:
            result.unknown.append(name)
            continue
        share = _EQUAL_SIZES if name == _SIZE else _NEGLIGIBLE
        if _is_worse(*values, share, is_lower_better=is_lower_better):
            result.worse.append(name)
    return result


def _is_worse(
    before: float | None, after: float | None, share: float, *, is_lower_better: bool
) -> bool:
    """Return whether the second value of a figure is worse by more than a share of the first.
    A value that is missing now is worse, too.
    """
    if before is None or before == -math.inf:
        return False
    if after is None:
        return True
    loss = after - before if is_lower_better else before - after
    return loss == math.inf or loss > share * abs(before)


def figure_rows(different: Difference) -> Iterator[TableRow]:
    """Yield for each figure its name, both values and what is to be said of them."""
    for name, values in different.figures.items():
        texts = [number_text(value, ".6g", missing="none") for value in values]
        remark = ""
        if name in different.worse:
            remark = "worse"
        elif name in different.unknown:
            remark = "not judged: it is not known whether less or more is better"
        yield name, *texts, remark


def of_folders(
    first: str, second: str, options: Options, *, html: str | None, is_judged: bool = False
) -> Difference:
    """Print and return the differences of two calibrations of one model.

    Args:
        first, second: the result folders.
        options: how the table looks.
        html: the page to write, if any.
        is_judged: whether a worse figure fails the command.

    Raises:
        ResultError: one is incomplete, or was changed.
        UsageError: they are of different models, or one is judged that was not tested.
    """
    before = side_of_folder(Path(first))
    after = side_of_folder(Path(second))
    if not (before.is_tested and after.is_tested):
        folder = second if before.is_tested else first
        fault = f"{folder} was not tested"
        if is_judged:
            raise UsageError(
                f"{fault}, so --fail-on cannot judge it",
                help=f"run `quantizer --quant_mode test --output_dir {folder} --model FILE` "
                "first",
            )
        say_note(f"note: {fault}, so no SQNR and no metric is compared")
        before = before.without_test()
        after = after.without_test()
    elif before.judged_on != after.judged_on:
        say_note(
            f"note: they were judged by other samples, {first} {before.judged_on}, and "
            f"{second} {after.judged_on}"
        )
    return _show(before, after, options, (html, first, second))


def of_configs(first: str, second: str, options: Options, *, html: str | None) -> Difference:
    """Print and return the differences of what two configs do to a model.

    Raises:
        ConfigError: one is not valid, or does not fit the model.
    """
    reads = [session.read_config_file(place) for place in (first, second)]
    with notes_on_stderr(True):
        original = traced_model(options).graph
    plans = [session.resolved_plan(read, original, quiet=True) for read in reads]
    paths: dict[str, str] = {}
    for plan in plans:
        paths |= path_names(plan.graph)
    before, after = (side_of_plan(plan, paths) for plan in plans)
    return _show(before, after, options, (html, first, second))


def _show(
    first: Side, second: Side, options: Options, places: tuple[str | None, str, str]
) -> Difference:
    """Print how the layers of two results differ, and return the difference.

    Args:
        first, second: the results.
        options: how the table looks.
        places: the page to write, if any, and the names of both results.
    """
    if first.model != second.model:
        raise UsageError(
            f"the first is of {first.model}, the second of {second.model}",
            help="give results of one model",
        )
    result = compare_sides(first, second)
    html, *names = places
    if html:
        table = tensor_table(result.rows, TableView({**second.paths, **first.paths}))
        content = {
            "model": first.model,
            "first": names[0],
            "second": names[1],
            "is_tested": "sqnr_db" in first.figures,
            "figures": list(figure_rows(result)),
            "worse": result.worse,
            "titles": table.titles,
            "rows": table.rows,
        }
        write_output(html, shown_by_plugin("diff page")(content))
    if options.json:
        click.echo(json_text(result.to_json()))
        return result
    view = view_of(options, {**second.paths, **first.paths})
    if result.rows:
        table = tensor_table(result.rows, view)
        output.print_table(table, output.console(exact=view.is_exact))
    for name, before, after, remark in figure_rows(result):
        line = f"{name} {before} → {after}"
        say(f"{line}, {remark}" if remark else line)
    count = len(result.rows)
    if count > 1:
        click.echo(f"{count} tensors differ")
    else:
        click.echo(f"{count or 'no'} tensor differs")
    return result
