"""`--quant_mode calib`: plan, algorithms, observing, what refines the scales, and the result folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from quantizer.cli import runlog, session
from quantizer.cli.adjust import Adjusted, refuse, run_algorithms
from quantizer.cli.options import RunOptions
from quantizer.cli.outcome import Outcome
from quantizer.cli.progress import BatchProgress
from quantizer.cli.refine import refine
from quantizer.engine import calibrate, checkpoint, results
from quantizer.engine.calibrate import Calibration
from quantizer.engine.finetune import check_mode
from quantizer.engine.finetune_checkpoint import FinetuneCheckpoint
from quantizer.engine.result_files import locked
from quantizer.errors import QuantizerError
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.report import tables
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches

logger = logging.getLogger(__name__)


def run_calib(options: RunOptions) -> Outcome:
    """Calibrate and write the result folder."""
    read = session.read_config(options.config_file)
    refuse(options, read.config)
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    folder = Path(options.output_dir)
    with locked(folder), runlog.recorded(folder, options):
        original = session.trace_model(options, loaded, batches)
        results.check_owner(folder, original.model, overwrite=options.overwrite)
        plan = session.make_plan(read, original, quiet=options.quiet)
        if options.inspect:
            session.console().print(tables.layer_table(plan.graph, plan.tensors, plan.floats))
        check_mode(options.fast_finetune, read.config.settings.target_device)
        reads_data = any(settings.needs_data for settings in read.config.algorithms)
        needs_data = plan.needs_data or options.fast_finetune is not None or reads_data
        if needs_data:
            session.require_data(batches)
        if options.resume:
            _check_resume(options, folder, needs_data)
        adjusted = run_algorithms(options, read, plan, batches) if read.config.algorithms else None
        if adjusted:
            plan = session.make_plan(read, original, quiet=True, graph=adjusted.graph)
        calibration = _calibrated(options, read, original, plan, batches, adjusted)
    content = {"tensors": len(plan.tensors), "batches": calibration.batches, "results": str(folder)}
    batches_read = f"{calibration.batches} batch{'' if calibration.batches == 1 else 'es'}"
    how = f"calibrated on {batches_read}" if needs_data else "quantized without data"
    said = f"{len(plan.tensors)} tensors {how}; results: {folder}"
    return Outcome({}, content | {"rules": plan.to_json()["rules"]}, [tables.rule_table(plan), said])


def _check_resume(options: RunOptions, folder: Path, needs_data: bool) -> None:
    """Say whether there is anything to go on with.

    Raises:
        ResultError: a checkpoint is of another mode of finetuning.
    """
    FinetuneCheckpoint.check_mode(folder, options.fast_finetune)
    if not needs_data:
        logger.warning("--resume has no effect: this config is calibrated without data, so nothing can be resumed")
    elif not any(folder.glob("checkpoint.*")):
        logger.warning("there is no checkpoint in %s: starting with the first batch", options.output_dir)


def _calibrated(
    options: RunOptions,
    read: session.ReadConfig,
    original: Graph,
    plan: Plan,
    batches: Batches,
    adjusted: Adjusted | None,
) -> Calibration:
    """Observe the float network of the plan where it has scales to find, refine them, and write everything."""
    folder, calibration = Path(options.output_dir), calibrate.start(plan)
    run_facts = {"seed": options.seed, "batch_size": options.batch_size, "subset_len": options.subset_len}
    keeper = checkpoint.Checkpoint(folder, original, read.config, run_facts)
    uses_data = any(settings.needs_data for settings in read.config.algorithms)
    if plan.needs_data or options.fast_finetune is not None:
        _observe(options, batches, keeper, calibration)
        uses_data = True
    elif batches.fingerprint is not None and uses_data:
        calibration.batches = batches.fingerprint["batches"]
    if options.fast_finetune:
        keeper.save(calibration)
    start = calibrate.solution(calibration)
    if adjusted:
        start = start.adjusted_by(adjusted.found, adjusted.report)
    found = refine(options, calibration, batches, start)
    finetuned = any(own is not start.weights.get(name) for name, own in found.weights.items())
    facts = {
        "seed": options.seed,
        "data": batches.fingerprint if uses_data else None,
        "stamp": batches.stamp if uses_data else None,
        "fast_finetune": options.fast_finetune if finetuned else None,
    }
    results.write_results(folder, original, read.config, calibration, found, facts)
    keeper.remove()
    return calibration


def _observe(options: RunOptions, batches: Batches, keeper: checkpoint.Checkpoint, calibration: Calibration) -> None:
    """Run the batches, with --resume those that a stopped calibration left; a stop leaves a checkpoint."""
    skip = keeper.restore(calibration) if options.resume else 0
    network = Network(calibration.plan.graph)
    with BatchProgress("calib", batches.total, bar=session.shows_bars(), quiet=options.quiet) as progress:
        progress.advance(skip)
        rest = _rest(options, batches, keeper, skip)
        try:
            calibrate.run(calibration, network, rest, lambda c: _after(keeper, c, batches, progress))
        except (KeyboardInterrupt, QuantizerError):
            if calibration.batches > skip:
                keeper.save(calibration)
                logger.warning("stopped after %d batches; --resume goes on from there", calibration.batches)
            raise


def _after(keeper: checkpoint.Checkpoint, calibration: Calibration, batches: Batches, progress: BatchProgress) -> None:
    progress.advance()
    keeper.batch_done(calibration, batches.seen)


def _rest(options: RunOptions, batches: Batches, keeper: checkpoint.Checkpoint, skip: int) -> Iterator[Batch]:
    """The batches that a resumed run has not seen; the others are read again and must be the same."""
    count = 0
    for batch in session.on_device(options, batches):
        count += 1
        if count > skip:
            yield batch
        elif count == skip:
            keeper.check_data(batches.seen)
    if count < skip:
        keeper.check_data(None)
