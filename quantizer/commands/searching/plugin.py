"""What the commands that try configs add: one does all steps of a run, and others look for a
better config.
"""

from quantizer.declarations import Command, Plugin

PLUGIN = Plugin(
    "searching",
    commands={
        "run": Command(
            "quantizer.commands.searching.run:run",
            "Quantize a model: config, calibration, test and export.",
            2,
        ),
        "analyze": Command(
            "quantizer.commands.searching.commands:analyze",
            "Measure how few bits each layer tolerates, and choose widths.",
            11,
        ),
        "tune": Command(
            "quantizer.commands.searching.commands:tune",
            "Change a config until gates hold, from cheap to dear.",
            12,
        ),
    },
)
