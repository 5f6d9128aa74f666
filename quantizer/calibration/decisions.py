"""The decisions that calibrations keep in their results, in their order."""

from quantizer.calibration.absorption import ABSORPTION
from quantizer.calibration.power_of_two_equalization.decision import POWER_OF_TWO_EQUALIZATION
from quantizer.calibration.step import Decision

DECISIONS: tuple[Decision, ...] = (ABSORPTION, POWER_OF_TWO_EQUALIZATION)
