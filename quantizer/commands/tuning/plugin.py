"""What the commands that look for a better config add."""

from quantizer.declarations import Command, Plugin

_ANALYZE = Command(
    "quantizer.commands.tuning.analyze:analyze",
    "Measure how few bits each layer tolerates, and choose widths.",
    11,
)
_TUNE = Command(
    "quantizer.commands.tuning.tune:tune",
    "Change a config until gates hold, from cheap to dear.",
    12,
)

PLUGIN = Plugin("tuning", commands={"analyze": _ANALYZE, "tune": _TUNE})
