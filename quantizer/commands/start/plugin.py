"""What the commands for a first config add, and the one that converts a config."""

from quantizer.declarations import Command, Plugin

PLUGIN = Plugin(
    "start",
    commands={
        "demo": Command(
            "quantizer.commands.start.start:demo",
            "Write a small trained example to try the commands on.",
            1,
        ),
        "init": Command(
            "quantizer.commands.start.start:init", "Write a config to start from.", 3
        ),
        "convert": Command(
            "quantizer.commands.start.start:convert",
            "Convert a config to the other form, layered or hierarchical.",
            5,
        ),
    },
)
