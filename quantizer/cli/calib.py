"""`--quant_mode calib`: the pipeline, followed at the shell, and the result folder."""

from __future__ import annotations

import logging
from pathlib import Path

from quantizer.cli import runlog, session
from quantizer.cli.follow import followed
from quantizer.cli.options import Options
from quantizer.cli.outcome import Outcome
from quantizer.cli.table_view import show_layers
from quantizer.config.diagnostics import ConfigError
from quantizer.engine import pipeline, results
from quantizer.engine.checkpoint import Checkpoints
from quantizer.engine.events import Forked
from quantizer.engine.finetune import check_checkpoint, check_mode
from quantizer.engine.job import Job
from quantizer.engine.result_files import locked
from quantizer.engine.target import TracedTarget
from quantizer.report import tables

logger = logging.getLogger(__name__)


def run_calib(options: Options) -> Outcome:
    """Calibrate and write the result folder."""
    read = session.read_config(options.config_file)
    check_mode(options.fast_finetune, read.config)
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    folder = Path(options.output_dir)
    with locked(folder), runlog.recorded(folder, options):
        original = session.trace_model(options, loaded, batches)
        results.check_owner(folder, original.model, overwrite=options.overwrite)
        checkpoints = Checkpoints(folder, resume=options.resume)
        job = Job(
            TracedTarget(original),
            read.config,
            batches,
            Forked(followed(read.sources, quiet=options.quiet), checkpoints),
            checkpoints,
            options.seed,
            options.fast_finetune,
            {"seed": options.seed, "batch_size": options.batch_size, "subset_len": options.subset_len},
            read.diagnostics,
            lambda job: _confirm(options, job),
        )
        try:
            pipeline.run(job)
        except ConfigError as error:
            raise ConfigError(error.diagnostics, read.sources) from error
        results.write_results(folder, original, read.config, job.calibration, job.solution, job.header)
        checkpoints.remove()
    return _outcome(job, folder)


def _confirm(options: Options, job: Job) -> None:
    """What is checked and shown once the plan is made.

    Raises:
        UsageError: data are needed, and there are none.
        ResultError: a checkpoint is of another mode of finetuning.
    """
    if options.inspect:
        show_layers(options, job.plan.graph, job.plan.tensors, job.plan.floats)
    if job.needs_data:
        session.require_data(job.batches)
    if options.resume and job.checkpoints:
        check_checkpoint(job.checkpoints, options.fast_finetune)
        if not job.needs_data:
            logger.warning("--resume has no effect: this config is calibrated without data, so nothing can be resumed")
        elif not job.checkpoints.exist():
            logger.warning("there is no checkpoint in %s: starting with the first batch", options.output_dir)


def _outcome(job: Job, folder: Path) -> Outcome:
    plan, batches = job.plan, job.calibration.batches
    content = {"tensors": len(plan.tensors), "batches": batches, "results": str(folder)}
    how = f"calibrated on {batches} batch{'' if batches == 1 else 'es'}" if job.needs_data else "quantized without data"
    said = f"{len(plan.tensors)} tensors {how}; results: {folder}"
    return Outcome({}, content | {"rules": plan.to_json()["rules"]}, [tables.rule_table(plan), said])
