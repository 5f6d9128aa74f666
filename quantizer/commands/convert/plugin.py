"""What the conversion of configs adds."""

from quantizer.declarations import Command, Plugin

_CONVERT = Command(
    "quantizer.commands.convert.convert:convert",
    "Convert a config to the other form, layered or hierarchical.",
    5,
)

PLUGIN = Plugin("convert", commands={"convert": _CONVERT})
