"""What the command for a report of a result folder adds."""

from quantizer.declarations import Command, Plugin

PLUGIN = Plugin(
    "report",
    needs=("page",),
    commands={
        "report": Command(
            "quantizer.commands.report.report:report_command",
            "Write report.html of a result folder again.",
            10,
        )
    },
)
