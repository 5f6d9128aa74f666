"""What the commands for a first config add."""

from quantizer.declarations import Command, Plugin

_DEMO = Command(
    "quantizer.commands.start.start:demo",
    "Write a small trained example to try the commands on.",
    1,
)
_INIT = Command("quantizer.commands.start.start:init", "Write a config to start from.", 3)

PLUGIN = Plugin("start", commands={"demo": _DEMO, "init": _INIT})
