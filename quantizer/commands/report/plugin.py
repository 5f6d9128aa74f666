"""What the command for a report of a result folder adds."""

from quantizer.declarations import Command, Plugin

_REPORT = Command(
    "quantizer.commands.report.report:report_command",
    "Write report.html of a result folder again.",
    10,
)

PLUGIN = Plugin("report", needs=("page",), commands={"report": _REPORT})
