"""What the command for all steps adds."""

from quantizer.declarations import Command, Plugin

_RUN = Command(
    "quantizer.commands.run.run:run",
    "Quantize a model in one call: config, calibration, test and export.",
    2,
)

PLUGIN = Plugin("run", commands={"run": _RUN})
