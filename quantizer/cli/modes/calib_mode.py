"""Runs `--quant_mode calib`: calibrates a model and writes the result folder."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from quantizer.calibration import memory_prediction
from quantizer.calibration.events import Events, ForkedEvents, RankChecks
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.target import Target
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.run_folder import log_run, missing_data, words_of, write_calibration
from quantizer.cli.terminal.follow import run_display
from quantizer.cli.terminal.output import Outcome, show_layers, table_view
from quantizer.config.diagnostics import pointing_into
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.wording import counted
from quantizer.distributed import ALONE, Ranks, require_alike
from quantizer.errors import UntraceableError
from quantizer.graph.ir import Graph
from quantizer.plan.remarks import left_parameters, share_left
from quantizer.plugins import commands
from quantizer.report import tables
from quantizer.report.view import TableView
from quantizer.results.checkpoint import Checkpoints, calibrated, check_checkpoint
from quantizer.results.result_set import locked, require_result_folder
from quantizer.results.write import check_owner

_logger = logging.getLogger(__name__)


def run_calib(
    options: Options,
    ranks: Ranks = ALONE,
    opened: session.OpenedRun | None = None,
    *,
    has_next_step: bool = False,
) -> Outcome:
    """Calibrate and write the result folder.

    Args:
        options: of the run.
        ranks: the processes of the run.
        opened: the model and its data, if they are open.
        has_next_step: whether the same command continues with a test. The checkpoints stay
            then, and the same command continues from them if it is stopped.
    """
    read, finetuned = session.config_as_asked(
        options.config_file, options.dpu_accuracy, options.fast_finetune
    )
    folder = from_start(options.output_dir)
    require_result_folder(folder)
    opened = opened or session.open_run(options)
    options = session.with_targets(options, opened.loaded.module)
    batches = opened.batches
    with _locked_folder(folder, options, ranks) as noted:
        original = _traced(opened)
        noted["data"] = batches.filled and batches.filled.to_json()
        noted["stamp"] = batches.stamp
        checkpoints: Checkpoints | None = None
        followers: list[Events] = [run_display(read.sources, quiet=options.quiet)]
        if ranks.is_first:
            check_owner(folder, original.model, overwrite=options.overwrite)
            checkpoints = Checkpoints(folder, resume=options.resume)
            if has_next_step:
                checkpoints.how_to_resume = "the same command continues from there"
            followers.append(checkpoints)
        request = CalibrationRequest(
            target=Target(original),
            config=read.config,
            batches=batches,
            events=ForkedEvents(*followers, RankChecks(ranks)),
            checkpoints=checkpoints,
            seed=options.seed,
            fast_finetune=finetuned,
            facts={
                "seed": options.seed,
                "batch_size": options.batch_size,
                "subset_len": options.subset_len,
            },
            findings=read.diagnostics,
            confirm=partial(_confirm, options, checkpoints),
            ranks=ranks,
            memory=options.memory,
            dpu_accuracy=options.dpu_accuracy,
        )
        _require_alike(ranks, request)
        with pointing_into(read.sources):
            state = calibrated(request, must_resume=options.resume)
        if checkpoints:
            command = ("calib", words_of(options))
            write_calibration(
                folder, request, state, original, command=command, has_next_step=has_next_step
            )
            if not has_next_step:
                checkpoints.remove()
    view = table_view(options, state.plan.graph)
    return _outcome(request, state, folder, view)


def _traced(opened: session.OpenedRun) -> Graph:
    """Return the trace of the model.

    Raises:
        UntraceableError: it cannot be traced; the help says what works without a trace.
    """
    try:
        return opened.graph
    except UntraceableError as error:
        raise with_remedy(error) from error


def _require_alike(ranks: Ranks, request: CalibrationRequest) -> None:
    """Raise `RankError` if ranks have different configs or models."""
    if ranks.is_alone:
        return
    digests = request.model_digests
    model = {"layer": digests["layers"], "weight": digests["weights"]}
    config = resolved_document(request.config)
    require_alike(ranks, {"config": config, **model}, "the model")


@contextmanager
def _locked_folder(folder: Path, options: Options, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Lock the result folder on the first rank, and write run.json at the end.

    Yields:
        Further entries of run.json, to fill in.
    """
    if ranks.is_first:
        with locked(folder), log_run(folder, options, ranks.world_size) as noted:
            yield noted
    else:
        yield {}


def _confirm(
    options: Options,
    checkpoints: Checkpoints | None,
    request: CalibrationRequest,
    state: CalibrationState,
) -> None:
    """Check and show the plan before calibration starts.

    Raises:
        UsageError: data is needed, and there is none; or a target cannot express the
            plan.
        OutOfMemoryError: there is not enough memory.
        ResultError: the checkpoint has another mode of finetuning.
    """
    plan = state.plan
    if options.inspect:
        show_layers(options, plan.graph, plan.tensors, plan.floats)
    for target in options.for_:
        # Only runs for a target need them
        from quantizer.cli.terminal.render import say_note
        from quantizer.export.refusals import plan_remarks, planned_refusals, refuse
        from quantizer.export.targets import checked_target

        checked = checked_target(target, options.target_choices)
        refuse(checked.words, planned_refusals(checked, plan, request.config.algorithms))
        for remark in plan_remarks(checked, plan):
            say_note(f"note: {remark}")
    if request.needs_data(plan) and request.batches.stands_in:
        raise missing_data(options)
    require_calibration_room(options, request, state)
    if options.resume and checkpoints:
        check_checkpoint(checkpoints, request.fast_finetune)
        if not request.needs_data(plan):
            _logger.warning(
                "--resume has no effect: this config needs no data, so there is nothing to "
                "resume"
            )
        elif not checkpoints.exist():
            _logger.warning(
                "there is no checkpoint in %s: calibration starts with the first batch",
                options.output_dir,
            )


def require_calibration_room(
    options: Options, request: CalibrationRequest, state: CalibrationState
) -> None:
    """Raise `OutOfMemoryError` if there is not enough memory for a calibration."""
    size = session.batch_size(options, request.batches)
    data = memory_prediction.BatchSizes(size, request.batches.total or 1, options.memory)
    plan = state.plan
    needed = memory_prediction.calibration_bytes(
        plan, request.config, data, finetuned=bool(request.fast_finetune)
    )
    remedies = memory_prediction.remedies(plan.graph)
    memory_prediction.require_room("calibration", needed, remedies)


def _outcome(
    request: CalibrationRequest, state: CalibrationState, folder: Path, view: TableView
) -> Outcome:
    plan = state.plan
    batches = state.calibration.batches
    left, _ = left_parameters(plan)
    content: dict[str, Any] = {
        "tensors": len(plan.tensors),
        "float_parameters": left,
        "batches": batches,
        "results": str(folder),
    }
    line = counted(len(plan.tensors), "tensor")
    if request.needs_data(plan):
        line += f" calibrated on {counted(batches, 'batch')}"
    else:
        line += " quantized without data"
    line += f"; results: {folder}"
    content["rules"] = plan.to_json()["rules"]
    shown: list[RenderableType] = [tables.rule_table(plan, view), line, share_left(left)]
    stamp = request.data_stamp(plan)
    if stamp:
        content["calibration_stamp"] = stamp
        shown.append(f"note: calibrated on {stamp}")
    return Outcome({}, content, shown, plan=plan)


def with_remedy(error: UntraceableError, reason: str = "") -> UntraceableError:
    """Return the error with the way that needs no trace in its help.

    Args:
        error: of the trace.
        reason: why this run cannot go that way, if it is known.
    """
    # Only a model without a trace needs it
    from quantizer.export.destinations import DESTINATIONS

    options: list[str] = []
    for name, row in DESTINATIONS.items():
        if row.wider:
            options += [f"`quantizer run MODEL --to {name}`", f"`--to {row.wider}`"]
    if not options or "run" not in commands():
        return error
    way = (
        f"{' or '.join(options)} needs no trace: it quantizes the weights of layers as modules"
    )
    if reason:
        way += f"; this run cannot: {reason}"
    lines = [] if error.help is None else error.help.splitlines()
    return UntraceableError(error.message, help=[*lines, way])
