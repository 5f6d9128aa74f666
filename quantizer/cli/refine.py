"""What calibration runs after it has observed every batch, in order: each step makes a better solution."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from quantizer.algorithms import bias_correction
from quantizer.algorithms.fast_finetune import FinetunedLayer
from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.cli import session
from quantizer.cli.options import RunOptions
from quantizer.cli.progress import BatchProgress
from quantizer.engine import attach
from quantizer.engine.calibrate import Calibration
from quantizer.engine.finetune import finetune
from quantizer.engine.finetune_checkpoint import FinetuneCheckpoint
from quantizer.engine.positions import aligned
from quantizer.engine.solution import Solution
from quantizer.errors import DataError, QuantizerError, ResultError
from quantizer.plan.model import Plan
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches

logger = logging.getLogger(__name__)

FEW_SAMPLES = 32  # below, finetuned weights fit the calibration data more than the model


def refine(options: RunOptions, calibration: Calibration, batches: Batches, found: Solution) -> Solution:
    """What a complete calibration found, and what the config and the options ask for beyond it."""
    if calibration.plan.settings.target_device == "DPU":
        found = align_positions(calibration.plan, found)
    if options.fast_finetune:
        found = finetune_weights(options, options.fast_finetune, calibration, batches, found)
    return correct_biases(options, calibration, batches, found) if calibration.means else found


def align_positions(plan: Plan, found: Solution) -> Solution:
    """The solution at positions that the DPU's shifters can take; each move is told."""
    found, moves = aligned(found, plan.graph, plan.settings)
    for move in moves:
        logger.info("note: %s", move)
    return found


def finetune_weights(
    options: RunOptions, mode: str, calibration: Calibration, batches: Batches, found: Solution
) -> Solution:
    """The solution with learned rounding, or as it was if the network's output would become worse.

    Raises:
        DataError: a layer's outputs are not finite, or the data are not the same when they are read again.
        ResultError: the checkpoint to resume from is damaged or of another run.
    """
    graph, samples = calibration.plan.graph, dict(batches.fingerprint or {}).get("samples", 0)
    if samples < FEW_SAMPLES:
        logger.warning(
            "finetuning on %d samples: weights fit these and not others; give it at least %d", samples, FEW_SAMPLES
        )
    run = {"mode": mode, "seed": options.seed, "data": batches.fingerprint}
    keeper = FinetuneCheckpoint(Path(options.output_dir), graph, found, run)
    settled = keeper.restore() if options.resume else {}
    if settled:
        logger.info("finetuning goes on after %d layers", len(settled))
    bar, nodes = session.shows_bars(), len(graph.nodes)
    with BatchProgress("fast finetune", nodes, bar=bar, quiet=options.quiet, unit="layers") as progress:

        def after_layer(layers: Mapping[str, FinetunedLayer]) -> None:
            keeper.layer_done(layers)
            progress.advance()

        try:
            made = finetune(
                graph,
                found,
                lambda: again(options, batches, "fast finetuning", "leave --fast_finetune out"),
                mode,
                seed=options.seed,
                done=settled,
                after_layer=after_layer,
            )
        except (KeyboardInterrupt, QuantizerError):
            logger.warning("stopped after %d finetuned layers; --resume goes on from there", keeper.save())
            raise
    logger.log(logging.WARNING if made.undone or not made.layers else logging.INFO, "%s", made.summary)
    return made.solution


def require_finetuned(asked: str | None, done: str | None) -> None:
    """Refuse results that were not finetuned in the mode that test mode is told.

    Raises:
        ResultError: they were not.
    """
    if asked and asked != done:
        how = f"finetuned with {done}" if done else "not finetuned"
        raise ResultError(
            f"--fast_finetune {asked}: these results were {how}",
            help=f"calibrate with --fast_finetune {asked}, or leave it out here",
        )


def correct_biases(options: RunOptions, calibration: Calibration, batches: Batches, found: Solution) -> Solution:
    """The solution with bias corrections, from a second pass over the data.

    Raises:
        DataError: a correction is not finite, or the data are not the same when they are read again.
    """
    plan, device = calibration.plan, session.device_of(options)
    remedy = "set include_bias_corr to false"
    data = again(options, batches, "bias correction", remedy)
    runner = SequentialRunner(attach.quantized_network(plan.graph, found).to(device), data)
    bar, layers = session.shows_bars(), len(plan.graph.nodes)
    with BatchProgress("bias correction", layers, bar=bar, quiet=options.quiet, unit="layers") as progress:
        corrections = bias_correction.correct_biases(
            runner, calibration.means, on_grid=plan.settings.target_device == "DPU", after_layer=progress.advance
        )
    name, largest = max(((layer, float(c.abs().max())) for layer, c in corrections.items()), key=lambda pair: pair[1])
    logger.info("biases of %d layers corrected, by at most %.3g in %s", len(corrections), largest, name)
    return replace(found, corrections=corrections)


def again(options: RunOptions, batches: Batches, step: str, remedy: str) -> Iterator[Batch]:
    """Another pass over the calibration data, on the device.

    Raises:
        DataError: it gives other batches than calibration saw.
    """
    seen, device = batches.fingerprint, session.device_of(options)
    for batch in batches:
        yield batch.to(device)
    if seen is not None and batches.fingerprint != seen:
        raise DataError(
            f"{batches.label} gives other batches when it is read again, and {step} reads it more than once",
            help=f"draw random crops and orders from a fixed seed, or {remedy}",
        )
