"""Runs `--exact` (the DPU's integers) and `--deploy` (other runtimes) after a test."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from quantizer.calibration.events import RunStage
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.terminal.follow import progress
from quantizer.cli.terminal.output import Outcome, table_view
from quantizer.config.json_types import JsonObject
from quantizer.errors import OutOfMemoryError, ResultError, UsageError
from quantizer.export.exporting import export, export_summary, figures_of_file
from quantizer.export.gates import EXACT_EQUAL
from quantizer.export.refusals import require_expressible
from quantizer.export.targets import EXPORTERS, FOLDER, checked_target
from quantizer.graph.ir import Graph
from quantizer.report.view import Listing, TableView
from quantizer.results.folder import QuantInfo
from quantizer.sources.data import Batches
from quantizer.storage.files import write_json
from quantizer.storage.process_memory import size_text

if TYPE_CHECKING:
    from quantizer.evaluation.exact import ExactComparison
    from quantizer.export.agreement import Verification
    from quantizer.export.deployment import Deployment


def require_dpu(device: str) -> None:
    """Raise `UsageError` for `--exact` if the calibration is for another device."""
    if device != "DPU":
        raise UsageError(
            "--exact runs the integer arithmetic of the DPU, but this calibration is for the "
            f"{device}",
            help='calibrate with "target_device": "DPU"',
        )


def run_exact(
    options: Options,
    outcome: Outcome,
    graph: Graph,
    info: QuantInfo,
    *,
    batches: Batches,
    place: Path | None,
) -> Outcome:
    """Run the batches again in integers, and write exact.json.

    Returns:
        The outcome with the metric `exact_equal` and a table.
    """
    # Only --exact needs it
    from quantizer.evaluation.exact import compare_exact

    with RunStage(progress(quiet=options.quiet), "exact", batches.total) as stage:
        counted = stage.counted(batch.to("cpu") for batch in batches)
        result = compare_exact(graph, info.solution, counted)
    content = asdict(result) | {"equal": result.equal}
    if place is not None:
        write_json(place / "exact.json", content)
    table = _exact_table(result, table_view(options, graph))
    outcome = _with_metrics(outcome, {EXACT_EQUAL: result.equal})
    return replace(
        outcome,
        content={**outcome.content, "exact": content},
        shown=[*outcome.shown, table, *_lines(result)],
    )


def _with_metrics(outcome: Outcome, metrics: dict[str, float]) -> Outcome:
    """Return an outcome with further metrics."""
    all_metrics = {**outcome.content["metrics"], **metrics}
    return replace(
        outcome,
        metrics={**outcome.metrics, **metrics},
        content={**outcome.content, "metrics": all_metrics},
    )


def _lines(result: ExactComparison) -> list[RenderableType]:
    """Return the lines below the table: overflows, layers in float, and the sum."""
    lines: list[RenderableType] = []
    for name, batch in result.overflows.items():
        lines.append(f"int32 overflow: the accumulator of {name}, batch {batch}")
    for name, why in result.floats.items():
        lines.append(f"in float: {name}: {why}")
    codes = sum(row.codes for row in result.layers)
    differing = sum(row.differing for row in result.layers)
    lines.append(f"exact_equal {result.equal:.6g}: {differing} of {codes} codes differ")
    return lines


def require_one(options: Options, graph: Graph, info: QuantInfo) -> None:
    """Raise `UsageError` before the run if no target of `--deploy` can express the network."""
    refusals = []
    for target in dict.fromkeys(options.deploy):
        try:
            checked = checked_target(target, options.target_choices)
            require_expressible(
                checked, graph, info.solution.specs, info.settings.onnx_opset_version
            )
        except UsageError as refusal:
            refusals.append(refusal)
    if len(refusals) == len(set(options.deploy)):
        raise refusals[0]


def deploy(
    options: Options,
    outcome: Outcome,
    deployment: Deployment,
    total: int | None,
    *,
    place: Path | None,
) -> Outcome:
    """Write and verify the files of `--deploy`, and write `verify.json`.

    If a target fails, the others are written all the same. The first failure is the error of
    the outcome.

    Args:
        options: of the run.
        outcome: of the test.
        deployment: what is exported.
        total: the number of batches to verify with, if it is known.
        place: the folder of the results; --output_dir if None.

    Returns:
        The outcome with the metrics and lines of each file.

    Raises:
        ResultError: the folder cannot be written, or leads out of the result folder.
    """
    folder = (place or from_start(options.output_dir)) / FOLDER
    if folder.is_symlink():
        raise ResultError(f"{folder} is a link to another folder", help="remove the link")
    view = table_view(options, deployment.graph)
    files = {}
    deployed: dict[Path, Verification] = {}
    exports: list[JsonObject] = []
    lines: list[str] = []
    metrics: dict[str, float] = {}
    failures: list[Exception] = []
    for target in dict.fromkeys(options.deploy):
        path = folder / f"{deployment.graph.model}{EXPORTERS[target].suffix}"
        try:
            follower = progress(quiet=options.quiet)
            verified = export(target, deployment, path, follower, total=total)
        except (ResultError, OutOfMemoryError):
            raise
        except Exception as failure:  # noqa: BLE001 - of any class; raised after the results are shown
            failures.append(failure)
            continue
        files[path.name] = verified.to_json()
        deployed[path] = verified
        summary = export_summary(target, path, verified)
        exports.append(summary)
        lines += _lines_of_file(path, summary["bytes"], verified, view)
        for name, figure in figures_of_file(target, verified, summary["bytes"]).items():
            # Of several files, the slowest and the largest count
            metrics[name] = max(figure, metrics.get(name, figure))
    if files or folder.exists():
        write_json(folder / "verify.json", files)
    for other in failures[1:]:
        lines.append(str(other).partition("\n")[0])
    outcome = _with_metrics(outcome, metrics)
    error = failures[0] if failures else None
    return replace(
        outcome,
        content={**outcome.content, "deployed": files},
        shown=[*outcome.shown, *lines],
        error=error,
        deployed=deployed,
        exports=exports,
    )


def _lines_of_file(
    path: Path, size_in_bytes: int, verified: Verification, view: TableView
) -> list[str]:
    """Return the lines that are shown for a deployed file."""
    size = size_text(size_in_bytes)
    lines = [f"deployed: {path}, {size}; against test mode, {verified.figures()}"]
    lines += map(view.text, verified.remarks)
    lines += map(view.text, verified.summary_lines)
    session = verified.default_session
    if session:
        lines.append(f"in a default session, {session.figures()}")
        lines += map(view.text, session.summary_lines)
    for engine in verified.engines:
        if engine.agrees:
            lines.append(engine.line)
    return lines


def _exact_table(comparison: ExactComparison, view: TableView) -> Listing:
    """Return a table with a row for each tensor with codes, in execution order. If there are
    too many, those with the most differing codes are shown.
    """
    lines = []
    ranks = []
    for row in comparison.layers:
        numbers = (row.position, row.codes, row.differing, row.most_steps)
        lines.append((row.layer, row.role, *map(str, numbers)))
        rank = None
        if row.differing:
            rank = -row.differing / row.codes
        ranks.append(rank)
    titles = ("layer", "tensor", "position", "codes", "differing", "at most steps")
    return view.listing(
        titles, lines, ranks, numbers=titles[2:], what="tensor", idle="without a difference"
    )
