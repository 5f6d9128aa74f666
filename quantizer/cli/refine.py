"""What calibration runs after it has observed every batch, in order: each step makes a better solution."""

from __future__ import annotations

import logging
from dataclasses import replace

from quantizer.algorithms import bias_correction
from quantizer.algorithms.walk import Walk
from quantizer.cli import session
from quantizer.cli.options import RunOptions
from quantizer.cli.progress import BatchProgress
from quantizer.engine import attach, calibrate
from quantizer.engine.calibrate import Calibration
from quantizer.engine.positions import aligned
from quantizer.engine.solution import Solution
from quantizer.errors import DataError
from quantizer.plan.model import Plan
from quantizer.sources.data import Batches

logger = logging.getLogger(__name__)


def refine(options: RunOptions, calibration: Calibration, batches: Batches) -> Solution:
    """The scales of a complete calibration, and what the config and the options ask for beyond them."""
    found = calibrate.solution(calibration)
    if calibration.plan.settings.target_device == "DPU":
        found = align_positions(calibration.plan, found)
    return correct_biases(options, calibration, batches, found) if calibration.means else found


def align_positions(plan: Plan, found: Solution) -> Solution:
    """The solution at positions that the DPU's shifters can take; each move is told."""
    found, moves = aligned(found, plan.graph, plan.settings)
    for move in moves:
        logger.info("note: %s", move)
    return found


def correct_biases(options: RunOptions, calibration: Calibration, batches: Batches, found: Solution) -> Solution:
    """The solution with bias corrections, from a second pass over the data.

    Raises:
        DataError: a correction is not finite, or the data are not the same when they are read again.
    """
    seen, plan, device = batches.fingerprint, calibration.plan, session.device_of(options)
    walk = Walk(attach.quantized_network(plan.graph, found).to(device), (batch.to(device) for batch in batches))
    if batches.fingerprint != seen:
        raise DataError(
            f"{batches.label} gives other batches when it is read again, and bias correction reads it twice",
            help="draw random crops and orders from a fixed seed, or set include_bias_corr to false",
        )
    bar, layers = session.shows_bars(), len(plan.graph.nodes)
    with BatchProgress("bias correction", layers, bar=bar, quiet=options.quiet, unit="layers") as progress:
        corrections = bias_correction.correct_biases(
            walk, calibration.means, on_grid=plan.settings.target_device == "DPU", after_layer=progress.advance
        )
    name, largest = max(((layer, float(c.abs().max())) for layer, c in corrections.items()), key=lambda pair: pair[1])
    logger.info("biases of %d layers corrected, by at most %.3g in %s", len(corrections), largest, name)
    return replace(found, corrections=corrections)
