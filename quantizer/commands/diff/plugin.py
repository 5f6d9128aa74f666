"""What the comparison of configs and of result folders adds."""

from quantizer.declarations import Command, Plugin

_DIFF = Command(
    "quantizer.commands.diff.diff:diff",
    "Show what differs between two configs or two result folders.",
    14,
)

PLUGIN = Plugin("diff", commands={"diff": _DIFF})
