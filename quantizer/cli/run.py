"""`--quant_mode float|calib|test`: one function each, from options to an exit code."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

import quantizer
from quantizer import memory
from quantizer.cli import runlog, session, torchrun
from quantizer.cli.annotations import annotate, annotate_warnings
from quantizer.cli.exact_and_deploy import deploy, require_dpu, require_one, run_exact
from quantizer.cli.follow import followed, progress
from quantizer.cli.gates import (
    MEASURED,
    about_all,
    failed,
    met,
    names_in_test,
    parse_gate,
    require_known,
    require_known_parts,
    require_measured,
)
from quantizer.cli.options import Options
from quantizer.cli.report_place import report_place
from quantizer.cli.reproduction import remember, words_of
from quantizer.cli.session import Outcome
from quantizer.cli.table_view import config_to_look, show_layers, table_view
from quantizer.config.diagnostics import pointing_into
from quantizer.config.resolved import resolved_document
from quantizer.distributed import ALONE, Ranks, require_alike
from quantizer.engine import fingerprint, footprint, pipeline, results
from quantizer.engine.calibrated import reopened, window_length
from quantizer.engine.checkpoint import Checkpoints
from quantizer.engine.events import Forked
from quantizer.engine.exact import require_wide
from quantizer.engine.finetune import check_checkpoint, require_asked
from quantizer.engine.job import Job
from quantizer.engine.measurable import not_measured, not_measured_by_targets
from quantizer.engine.output_figures import POOLED_FIGURE
from quantizer.engine.result_files import write_text
from quantizer.engine.result_set import locked
from quantizer.engine.same_calibration import check_plan
from quantizer.engine.scores import Scores, measure, score
from quantizer.engine.target import TracedTarget
from quantizer.errors import GateError, UsageError
from quantizer.export import as_run, planned_refusals, refuse, require_extras
from quantizer.export.choices import require_choices
from quantizer.export.deployment import Deployment
from quantizer.graph.output_parts import output_parts
from quantizer.plan.remarks import left_parameters, share_left
from quantizer.report import tables
from quantizer.report.files import READ, report_of, write_report
from quantizer.report.view import View
from quantizer.seeding import seed_everything
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate

logger = logging.getLogger(__name__)

FAULT_HELP = (
    "give that layer and those before it more bits or a wider range, or leave them float"
)

RAISING = ("fast_finetune", "dpu_accuracy")
"""Options of calibration that test mode takes as well, to say that the results were made with
them.
"""


DECIDING = (
    *("quant_mode", "batch_size", "subset_len", "seq_len", "stride", "seed"),
    *("fast_finetune", "dpu_accuracy", "deploy"),
)
"""Options that decide the result, and are the same words on every machine."""


def run(options: Options) -> int:
    """Run one mode; the exit code is 0, or that of the error raised."""
    gates = [parse_gate(text) for text in options.gate]
    if gates and options.quant_mode == "calib":
        raise UsageError("--gate goes with test or float mode: calibration measures nothing")
    if options.deploy and options.quant_mode != "test":
        raise UsageError(
            "--deploy goes with test mode: it writes the network that was calibrated and tested"
        )
    require_choices(options.target_choices, options.deploy)
    if options.for_ and options.quant_mode != "calib":
        raise UsageError(
            "--for goes with calib mode and with `quantizer plan`: it looks ahead of a "
            "calibration"
        )
    if options.report_dir and options.quant_mode != "test":
        raise UsageError(
            "--report_dir goes with test mode: it says where that writes what it finds"
        )
    if options.exact and options.quant_mode != "test":
        raise UsageError(
            "--exact goes with test mode: it runs the integers of the network that was "
            "calibrated"
        )
    for name in RAISING:
        if getattr(options, name) and options.quant_mode == "float":
            raise UsageError(
                f"--{name} goes with calib mode, and with test mode to say that it was used"
            )
    if options.memory is not None and options.quant_mode != "calib":
        raise UsageError(
            "--memory goes with calib mode: the others keep no values of earlier batches"
        )
    if options.resume and options.quant_mode != "calib":
        raise UsageError(
            "--resume goes with calib mode: it goes on with a calibration that was stopped"
        )
    require_extras((*options.deploy, *options.for_))
    seed_everything(options.seed)
    # With --json, stdout is for the result alone: what the user's own code prints goes to
    # stderr.
    with (
        torchrun.joined(options) as (ranks, own),
        session.notes_on_stderr(own.quiet),
        redirect_stdout(sys.stderr if options.json else sys.stdout),
    ):
        require_alike(ranks, _deciding(options), "the versions and options")
        outcome = MODES[options.quant_mode](own, ranks)
    if not ranks.is_first:
        return 0
    session.show(outcome, options)
    if (
        options.quant_mode != "float"
        and not (options.json or options.quiet)
        and (size := memory.peak())
    ):
        print(f"peak memory {memory.in_words(size)}")
    if not options.json:
        for line in met(gates, outcome.metrics):
            print(line)
    not_met = failed(gates, outcome.metrics)
    # Their names are known, but nothing has these figures
    if options.quant_mode == "test" and outcome.error is None:
        not_met += [
            f"{gate.text} (not measured)"
            for gate in gates
            if gate.metric not in outcome.metrics
        ]
    if not_met:
        annotate(options, not_met, outcome.report)
        undeployed = (
            "; nothing is deployed"
            if options.deploy and "deployed" not in outcome.content
            else ""
        )
        help_ = "the table above shows which layers lose most"
        raise GateError(f"not met: {', '.join(not_met)}{undeployed}", help=help_)
    if outcome.error:
        raise outcome.error
    require_known(gates, outcome.metrics)
    return 0


def run_float(options: Options, ranks: Ranks = ALONE) -> Outcome:
    """The float model alone: its metrics on the evaluation data, by rank 0."""
    if not ranks.is_first:
        return Outcome({}, {})
    loaded = session.open_model(options)
    evaluator = _evaluate(options, loaded)
    gates = [parse_gate(text) for text in options.gate]
    if evaluator is None:
        require_known(gates, MEASURED)
    batches = session.open_data(options, loaded, evaluation=True)
    if evaluator is None:
        require_measured(gates, not_measured_by_targets(batches.first()))
    if options.inspect:
        graph = session.trace_model(options, loaded, batches)
        plan = session.make_plan(
            config_to_look(options.config_file), graph, quiet=options.quiet
        )
        show_layers(options, plan.graph, plan.tensors, plan.floats)
    device, follower = session.device_of(options), progress(quiet=options.quiet)
    metrics = measure(loaded.module, batches, device, follower, "float", evaluator)
    if not metrics:
        raise UsageError(
            "there is nothing to measure: no evaluate(model, data), and the data have no "
            "targets",
            help="add evaluate() to the model's file, give --evaluate, or data with (input, "
            "target) pairs",
        )
    return Outcome(metrics, {"metrics": metrics}, _lines(metrics))


def run_calib(options: Options, ranks: Ranks = ALONE) -> Outcome:
    """Calibrate and write the result folder."""
    read, finetuned = session.config_as_asked(
        options.config_file, options.dpu_accuracy, options.fast_finetune
    )
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    folder = Path(options.output_dir)
    with _opened(folder, options, ranks) as noted:
        original = session.trace_model(options, loaded, batches, compared=True)
        noted["data"] = batches.filled and batches.filled.to_json()
        if ranks.is_first:
            results.check_owner(folder, original.model, overwrite=options.overwrite)
        checkpoints = Checkpoints(folder, resume=options.resume) if ranks.is_first else None
        job = Job(
            TracedTarget(original),
            read.config,
            batches,
            Forked(
                *filter(None, (followed(read.sources, quiet=options.quiet), checkpoints)),
                torchrun.Watched(ranks),
            ),
            checkpoints,
            options.seed,
            finetuned,
            {
                "seed": options.seed,
                "batch_size": options.batch_size,
                "subset_len": options.subset_len,
            },
            read.diagnostics,
            lambda job: _confirm(options, job),
            ranks,
            options.memory,
            options.dpu_accuracy,
        )
        if not ranks.is_alone:
            model = {"layer": job.made_of["layers"], "weight": job.made_of["weights"]}
            config = resolved_document(job.config)
            require_alike(ranks, {"config": config, **model}, "the model")
        with pointing_into(read.sources):
            pipeline.run(job)
        if checkpoints:
            results.write_results(
                folder, original, job.config, job.calibration, job.solution, job.header
            )
            opened = results.open_written(folder, READ)
            write_report(opened, commands=remember(opened, "calib", words_of(options)))
            checkpoints.remove()
    return _outcome(job, folder)


def run_test(options: Options, ranks: Ranks = ALONE) -> Outcome:
    """Compare the calibrated network with the float one and report."""
    folder = Path(options.output_dir)
    info = results.read_info(folder)
    if options.exact:
        require_dpu(info.settings.target_device)
    for name in RAISING:
        require_asked(f"--{name}", getattr(options, name), info.header.get(name))
    level = info.header.get("dpu_accuracy")
    read = (
        session.config_as_asked(options.config_file, level)[0]
        if options.config_file is not None
        else None
    )
    loaded = session.open_model(options)
    evaluator, gates = _evaluate(options, loaded), [parse_gate(text) for text in options.gate]
    if evaluator is None:
        require_known(about_all(gates), names_in_test(MEASURED, options))
    seq_len = window_length(info.header["inputs"])
    batches = session.open_data(options, loaded, evaluation=True, seq_len=seq_len)
    with report_place(info, options, ranks) as (place, noted):
        original = session.trace_model(options, loaded, batches)
        require_known_parts(gates, output_parts(original))
        noted["data"] = batches.filled and batches.filled.to_json()
        if not ranks.is_alone:
            facts = {
                "results": info.files.identity,
                "layer": fingerprint.layers(original),
                "weight": fingerprint.weights(original),
            }
            require_alike(ranks, facts, "the calibrated model")
        calibrated = reopened(
            loaded.module, batches.first().to(session.device_of(options)), original, info
        )
        info = replace(info, solution=calibrated.solution)
        graph = calibrated.graph
        if read is not None:
            check_plan(
                info, read.config, session.make_plan(read, original, quiet=True, graph=graph)
            )
        require_one(options, graph, info)
        if options.exact:
            require_wide(graph, info.solution)
        if options.inspect:
            show_layers(options, graph, info.solution.tensors, {})

        require_measured(gates, not_measured(graph))
        if evaluator is None:
            require_measured(gates, not_measured_by_targets(batches.first(), graph))

        def check(metrics: Collection[str]) -> None:
            directions = BY_NAME if evaluator is None else evaluator.directions
            require_known(about_all(gates), names_in_test(metrics, options, directions))

        calibrated = calibrated.with_solution(
            as_run(options.deploy, graph, calibrated.solution)
        )
        more = footprint.comparison_bytes(
            graph, info.solution.specs, session.batch_size(options, batches)
        )
        footprint.require_room("test mode", more, footprint.remedies(graph))
        follower = Forked(progress(quiet=options.quiet), torchrun.Watched(ranks))
        scores = score(
            calibrated,
            loaded.module,
            batches,
            follower,
            evaluator,
            check,
            ranks,
            explained=True,
        )
        if not ranks.is_first:
            return Outcome(scores.metrics, {})
        held = {
            gate.text: gate.holds(scores.gated) for gate in gates if gate.metric in scores.gated
        }
        view = table_view(options, graph)
        noted |= _noted(scores)
        commands = {**info.commands, "test": words_of(options)}
        if place is not None:
            commands = remember(info, "test", words_of(options), place)
        outcome = _report(
            view, info, scores, batches.stamp, gates=held, place=place, commands=commands
        )
        annotate_warnings(options, outcome.report)
        if scores.fault:
            return replace(outcome, error=GateError(scores.fault, help=FAULT_HELP))
        if options.exact:
            outcome = run_exact(options, outcome, graph, info, batches, place=place)
        if not options.deploy or failed(gates, outcome.metrics):
            return outcome
        figures, choices, lost = scores.quantization, options.target_choices, scores.lost
        given = Deployment.of(
            calibrated, loaded.module, batches, figures, choices, warnings=lost
        )
        return deploy(options, outcome, given, batches.total, place=place)


def _noted(scores: Scores) -> dict[str, Any]:
    """Return what run.json says of a test besides its options."""
    passes = None if scores.passes is None else scores.passes.to_json()
    return {"passes": passes, "warnings": [warning.to_json() for warning in scores.warnings]}


def _deciding(options: Options) -> dict[str, Any]:
    """What decides the result before a model is there."""
    words = {f"--{name}": getattr(options, name) for name in DECIDING}
    return {"quantizer": quantizer.__version__, "torch": torch.__version__, **words}


@contextmanager
def _opened(folder: Path, options: Options, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """The result folder, to write; of several ranks the first does that alone. Gives what
    run.json says besides.
    """
    if ranks.is_first:
        with locked(folder), runlog.recorded(folder, options, ranks.world_size) as noted:
            yield noted
    else:
        yield {}


MODES: dict[str, Callable[[Options, Ranks], Outcome]] = {
    "float": run_float,
    "calib": run_calib,
    "test": run_test,
}


def _confirm(options: Options, job: Job) -> None:
    """What is checked and shown once the plan is made.

    Raises:
        UsageError: data are needed, and there are none; or a target of `--for` cannot hold what
            is planned.
        OutOfMemoryError: the machine does not have the memory.
        ResultError: a checkpoint is of another mode of finetuning.
    """
    if options.inspect:
        show_layers(options, job.plan.graph, job.plan.tensors, job.plan.floats)
    for target in options.for_:
        refuse(target, planned_refusals(target, job.plan))
    if job.needs_data and job.batches.stands_in:
        raise session.missing_data()
    size, batches = session.batch_size(options, job.batches), job.batches
    data = footprint.Data(size, batches.total or 1, options.memory)
    more = footprint.calibration_bytes(
        job.plan, job.config, data, finetuned=bool(job.fast_finetune)
    )
    footprint.require_room("calibration", more, footprint.remedies(job.plan.graph))
    if options.resume and job.checkpoints:
        check_checkpoint(job.checkpoints, job.fast_finetune)
        if not job.needs_data:
            logger.warning(
                "--resume has no effect: this config is calibrated without data, so nothing "
                "can be resumed"
            )
        elif not job.checkpoints.exist():
            logger.warning(
                "there is no checkpoint in %s: starting with the first batch",
                options.output_dir,
            )


def _outcome(job: Job, folder: Path) -> Outcome:
    plan, batches = job.plan, job.calibration.batches
    left, _ = left_parameters(plan)
    content = {
        "tensors": len(plan.tensors),
        "float_parameters": left,
        "batches": batches,
        "results": str(folder),
    }
    how = (
        f"calibrated on {batches} batch{'' if batches == 1 else 'es'}"
        if job.needs_data
        else "quantized without data"
    )
    said = f"{len(plan.tensors)} tensors {how}; results: {folder}"
    return Outcome(
        {},
        content | {"rules": plan.to_json()["rules"]},
        [tables.rule_table(plan), said, share_left(left)],
    )


def _evaluate(options: Options, loaded: LoadedModel) -> Evaluate | None:
    return (
        load_evaluate(options.evaluate, loaded.directions)
        if options.evaluate
        else loaded.evaluate
    )


def _report(
    view: View,
    info: results.QuantInfo,
    scores: Scores,
    stamp: str | None,
    *,
    gates: Mapping[str, bool],
    place: Path | None,
    commands: Mapping[str, list[str]],
) -> Outcome:
    """Write what test mode found, and which gates hold, if there is a place; say what to show
    of it.
    """
    compared = scores.comparison
    rows = tables.layer_rows(
        compared, {key: tensor.spec for key, tensor in info.solution.tensors.items()}
    )
    stamp = stamp or info.header.get("stamp")
    report = tables.report(
        scores.metrics,
        scores.pairs,
        rows,
        stamp,
        scores.passes,
        outputs=compared.outputs,
        warnings=scores.warnings,
        directions=scores.directions,
    )
    if gates:
        report["gates"] = gates
    shown: list[RenderableType] = [tables.damage_table(rows, view)]
    if place is None:
        values, _ = report_of(info, report, commands)
    else:
        values = write_report(info, report, place, commands=commands)
        write_text(place / "layers.csv", tables.as_csv(rows))
        shown.append(f"results: {place}")
    if stamp:
        shown.append(f"note: {stamp}")
    if scores.pairs:
        shown.append(tables.metric_table(scores.pairs))
    metrics = compared.metrics()
    if len(report["outputs"]) > 1:
        shown.append(tables.output_table(report["outputs"], view))
    else:
        metrics.pop(POOLED_FIGURE, None)  # of a single part it says nothing more
    shown += _lines(metrics)
    if scores.passes is not None:
        shown.append(scores.passes.line)
    return Outcome(scores.gated, report, shown, report=values)


def _lines(metrics: dict[str, float]) -> list[RenderableType]:
    return [f"{name} {value:.6g}" for name, value in metrics.items()]
