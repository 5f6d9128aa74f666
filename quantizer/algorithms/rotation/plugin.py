"""Declares rotation."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.rotation.settings:RotationConfig"
PLUGIN = Plugin(
    "rotation",
    rank=21,
    algorithms={"rotation": ListedAlgorithm(_SETTINGS, aliases=("quarot",))},
)
