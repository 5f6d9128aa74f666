"""Declares SmoothQuant."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.smoothquant.settings:SmoothQuantConfig"
PLUGIN = Plugin(
    "smoothquant",
    rank=20,
    algorithms={"smoothquant": ListedAlgorithm(_SETTINGS, aliases=("smooth",))},
)
