"""What commands add: those that look at a model before a calibration, and `diff`."""

from quantizer.declarations import Command, Plugin

_DOCTOR = Command(
    "quantizer.commands.inspection.commands:doctor",
    "Check machine, config, data and model before a run.",
    7,
)
_INSPECT = Command(
    "quantizer.commands.inspection.commands:inspect",
    "List the layers of a model and what can be quantized.",
    8,
)
_PLAN = Command(
    "quantizer.commands.inspection.commands:plan",
    "Show what a config does to a model, without calibrating.",
    9,
)
_TARGETS = Command(
    "quantizer.commands.inspection.targets:targets",
    "List the names of --to: what each makes, for which engine.",
    3,
)
_DIFF = Command(
    "quantizer.commands.inspection.diff:diff",
    "Show what differs between two configs or two result folders.",
    14,
)

PLUGIN = Plugin(
    "inspection",
    commands={
        "doctor": _DOCTOR,
        "inspect": _INSPECT,
        "plan": _PLAN,
        "diff": _DIFF,
        "targets": _TARGETS,
    },
)
