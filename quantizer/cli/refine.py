"""What calibration runs after it has observed every batch, in order: each step takes a solution and gives a better one."""

from __future__ import annotations

from quantizer.cli.options import RunOptions
from quantizer.engine import calibrate
from quantizer.engine.calibrate import Calibration
from quantizer.engine.solution import Solution
from quantizer.sources.data import Batches


def refine(options: RunOptions, calibration: Calibration, batches: Batches) -> Solution:
    """The scales of a complete calibration, and what the config and the options ask for beyond them."""
    found = calibrate.solution(calibration)
    return found
