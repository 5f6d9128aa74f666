"""What commands add: those that look at a model before a calibration, and `diff`."""

from quantizer.declarations import Command, Plugin

PLUGIN = Plugin(
    "inspection",
    commands={
        "doctor": Command(
            "quantizer.commands.inspection.commands:doctor",
            "Check machine, config, data and model before a run.",
            7,
        ),
        "inspect": Command(
            "quantizer.commands.inspection.commands:inspect",
            "List the layers of a model and what can be quantized.",
            8,
        ),
        "plan": Command(
            "quantizer.commands.inspection.commands:plan",
            "Show what a config does to a model, without calibrating.",
            9,
        ),
        "diff": Command(
            "quantizer.commands.inspection.diff:diff",
            "Show what differs between two configs or two result folders.",
            14,
        ),
        "targets": Command(
            "quantizer.commands.inspection.targets:targets",
            "List the names of --to: what each makes, for which engine.",
            3,
        ),
    },
)
