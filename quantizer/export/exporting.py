"""Writes the files of a target, verifies them, and returns what the report says of them.
Imports no torch by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from quantizer.calibration.events import NO_FOLLOWER, Events, RunStage
from quantizer.config.wording import did_you_mean, joined
from quantizer.declarations import FILE_SIZE, LATENCY
from quantizer.errors import ModelError, UsageError, VerificationError
from quantizer.export.exporter import exporter_of, new_files
from quantizer.export.refusals import refused_by_libraries, require_expressible, require_extras
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS, FOLDER, checked_target
from quantizer.plugins import loaded
from quantizer.storage.folder_list import LIST_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from quantizer.calibration.solution import Solution
    from quantizer.export.agreement import Verification
    from quantizer.export.deployment import Deployment
    from quantizer.export.layer_choice import LayerChoice
    from quantizer.graph.ir import Graph
    from quantizer.results.calibrated import Calibrated
    from quantizer.sources.batches import Batch

_logger = logging.getLogger(__name__)


def export_modules(model: nn.Module, folder: Path, batches: Iterable[Batch]) -> Verification:
    """Write a model that was quantized in place, and verify what was written.

    Args:
        model: a model of transformers.
        folder: to write.
        batches: of calls; at least one.

    Raises:
        QuantizerError: the exporter of the target raises it.
        UsageError: no plug-in is there that writes such models.
    """
    for name, row in EXPORTERS.items():
        if row.modules_exporter:
            require_extras([name])
            return cast("Verification", loaded(row.modules_exporter)(model, folder, batches))
    raise UsageError(
        "no plug-in is there that writes a model that was quantized in place",
        help="`save` writes the state of its modules",
    )


def as_run(
    targets: Iterable[str],
    graph: Graph,
    solution: Solution,
    choices: Mapping[str, str] | None = None,
) -> Solution:
    """Return the solution with what the runtimes of these targets round in addition.

    Test mode runs this solution, so that its metrics count that rounding.

    Args:
        choices: values of the targets' options, by name.
    """
    for target in targets:
        solution = exporter_of(target, choices).as_run(graph, solution)
    return solution


def chosen_layers(
    calibrated: Calibrated,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    targets: Iterable[str],
    choices: Mapping[str, str],
    folder: Path,
) -> LayerChoice | None:
    """Return which layers stay in float because integers are slower there.

    Args:
        calibrated: with all its quantizations.
        model: the float model.
        batches: of the evaluation data. The first one is measured.
        targets: those that are written.
        choices: values of their options, by name, one of which chooses layers.
        folder: of the files.

    Returns:
        None if no target chooses.

    Raises:
        ResultError: a deploy.json does not fit the network.
        UsageError: the machine is too busy to measure.
    """
    # It needs torch
    from quantizer.export.deployment import Deployment

    deployment = Deployment.of(calibrated, model, batches, {}, choices=choices, metrics={})
    for target in targets:
        exporter = exporter_of(target, choices)
        path = folder / f"{deployment.graph.model}{EXPORTERS[target].suffix}"
        with refused_by_libraries(target, deployment.graph):
            choice = exporter.layer_choice(deployment, path)
        if choice is not None:
            return choice
    return None


def export(
    target: str,
    deployment: Deployment,
    path: Path,
    events: Events = NO_FOLLOWER,
    *,
    total: int | None = None,
) -> Verification:
    """Write one file, read it back, and return how far it is from test mode.

    A file that fails is not written, and one of an earlier export is removed, if a list of
    quantizer's has it.

    Args:
        events: receives the progress of verification, counted in batches.
        total: the number of batches, if it is known.

    Raises:
        UsageError: the target cannot express what the config asks of a layer; nothing is
            written then.
        ModelError: the target cannot translate a layer, or a library fails.
        VerificationError: the file does not compute what test mode does.
        ResultError: the file cannot be written.
    """
    # It needs torch
    from quantizer.plan.remarks import size_remarks

    exporter = exporter_of(target, deployment.choices)
    checked = checked_target(target, deployment.choices)
    if not EXPORTERS[target].by_tensor:
        deployment = deployment.in_memory()
    try:
        with (
            RunStage(events, f"verify {target}", total) as stage,
            refused_by_libraries(target, deployment.graph),
        ):
            deployment = deployment.followed(stage)
            require_expressible(
                checked, deployment.graph, deployment.solution.specs, deployment.opset
            )
            with (
                new_files(exporter, path, deployment.model) as new_path,
                exporter.write(deployment, new_path) as written,
            ):
                verification = exporter.verify(deployment, written)
    except (UsageError, ModelError, VerificationError):
        exporter.remove(path)
        raise
    losses = [f"in test mode already: {text}" for text in deployment.warnings]
    return replace(
        verification,
        remarks=(*verification.remarks, *size_remarks(deployment.graph), *losses),
        asides=(*verification.asides, *losses),
        activation_codes=verification.activation_codes or exporter.activation_codes,
    )


def size_on_disk(target: str, path: Path) -> int:
    """Return the bytes of a target's files at `path`, or of the files in its folder."""
    files: Iterable[Path] = exporter_of(target).files(path)
    if path.is_dir():
        files = [file for file in path.iterdir() if file.name != LIST_FILE]
    return sum(file.stat().st_size for file in files if file.exists())


def exportable(
    graph: Graph, batch: Batch, targets: Iterable[str], trace_fixed: Callable[[], Graph]
) -> Graph:
    """Return the graph of a model, or one with a fixed batch if torch.export needs that.

    All targets share one program. A network whose weights stay in files has none: to make it
    takes all of them into memory.

    Args:
        graph: as traced.
        batch: that it was traced on.
        targets: of files.
        trace_fixed: traces the model with the number of samples of the batch.

    Raises:
        ModelError: torch.export refuses the network.
    """
    rows = [EXPORTERS[CHECKED_TARGETS[target].target] for target in targets]
    has_operators = any(not (row.by_tensor or row.for_transformers) for row in rows)
    if graph.is_deferred or not has_operators:
        return graph
    # It needs torch
    from quantizer.graph.tracing.batch_axes import has_open_batch

    try:
        _make_program(graph, batch)
        return graph
    except ModelError as error:
        if not has_open_batch(graph):
            raise
        reason = error.message
    _logger.warning(
        "%s; its batch size is fixed at %d, and only such batches can run", reason, batch.size
    )
    fixed = trace_fixed()
    _make_program(fixed, batch)
    return fixed


def _make_program(graph: Graph, batch: Batch) -> None:
    """Make the program of a network in float.

    Raises:
        ModelError: torch.export refuses it.
    """
    # They need torch
    import torch

    from quantizer.calibration.solution import Solution
    from quantizer.export.deployment import Deployment
    from quantizer.export.programs.program import float_program
    from quantizer.export.value_names import in_traced_order

    graph = graph.on(torch.device("cpu"))

    call = in_traced_order(graph, batch.to("cpu"))
    float_program(Deployment(graph, Solution({}), *call))


def figures_of_file(target: str, verified: Verification, size: int) -> dict[str, float]:
    """Return the figures of a verified file that gates may be about, by name.

    Args:
        target: the name of its target.
        verified: its comparison with test mode.
        size: its bytes.
    """
    figures: dict[str, float] = {FILE_SIZE: size / 1e6}
    kernels = verified.used_kernels
    if kernels is not None:
        shares = zip(EXPORTERS[target].int8_metrics, kernels.shares, strict=True)
        figures |= {name: share for name, share in shares if share is not None}
    speed = (verified.default_session or verified).speed
    if speed is not None:
        figures[LATENCY] = speed.seconds * 1000
    return figures


def unknown_metric(about: str, metric: str, known: Collection[str]) -> UsageError:
    """Return the error about a gate whose metric is not in `known`. `about` names the gate.

    The help names the closest metric, or the targets on whose files it is measured.
    """
    shown = f"known here: {', '.join(sorted(known))}; evaluate() may return others"
    remedy = did_you_mean(metric, known, shown)
    makers = [name for name, row in EXPORTERS.items() if metric in row.metrics]
    if makers:
        remedy = f"it is measured on files of <--deploy {joined(makers, 'or')}>"
    return UsageError(f"{about}: there is no metric {metric!r}", help=remedy)


def export_summary(target: str, path: Path, verified: Verification) -> dict[str, Any]:
    """Return the facts about a verified file, as report.json has them.

    Args:
        target: the name of its target.
        path: of the file or folder.
        verified: its comparison with test mode.
    """
    summary: dict[str, Any] = {
        "file": path.name,
        "target": target,
        "bytes": size_on_disk(target, path),
        "checks": _checks(target, verified),
        "remarks": list(verified.remarks),
    }
    if verified.choice_file:
        summary["choice"] = f"{FOLDER}/{verified.choice_file}"
    session = verified.default_session
    kernels = verified.used_kernels
    if kernels is not None:
        summary["kernels"] = {
            "integer": len(kernels.integer),
            "count": kernels.count,
            "share": kernels.share,
            "multiply_add_share": kernels.multiply_add_share,
            "text": kernels.counted,
            "floating": kernels.floating,
            "is_run": kernels.is_run,
        }
    speed = None if session is None else session.speed
    if speed is not None:
        facts = ("ratio", "low", "high", "rounds", "is_clear", "text")
        summary["speed"] = {name: getattr(speed, name) for name in facts}
    return summary


def _checks(target: str, verified: Verification) -> list[dict[str, Any]]:
    """Return a row for each engine that has run the file: whether it agrees with test mode, and
    the figures in words.
    """
    reader = EXPORTERS[target].reader
    session = verified.default_session
    # Without the agreement of the reader no file is written
    rows: list[tuple[str, bool, str]] = []
    if session is not None:
        sentences = [session.figures()]
        if session.kernels is not None:
            # The page has the lines on kernels and speed elsewhere
            first = len(session.kernels.summary_lines)
            sentences += session.summary_lines[first:]
        settings = "default settings"
        if session.kernels is not None and not session.kernels.is_run:
            settings = "without kernels of integers"
        rows.append((f"{reader}, {settings}", True, "; ".join(sentences)))
        reader = f"{reader}, {EXPORTERS[target].plainly}"
    rows.append((reader, True, verified.figures()))
    rows += [(check.engine, check.agrees, check.line) for check in verified.engines]
    return [{"engine": engine, "agrees": agrees, "text": text} for engine, agrees, text in rows]
