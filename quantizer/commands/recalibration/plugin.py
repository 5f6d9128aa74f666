"""What the commands that calibrate from stored statistics add."""

from quantizer.declarations import Command, Plugin

_RETUNE = Command(
    "quantizer.commands.recalibration.commands:retune",
    "Recompute scales from the statistics of a calibration.",
    13,
)
_MERGE = Command(
    "quantizer.commands.recalibration.commands:merge",
    "Merge result folders that were calibrated on parts of the data.",
    15,
)

PLUGIN = Plugin("recalibration", commands={"retune": _RETUNE, "merge": _MERGE})
