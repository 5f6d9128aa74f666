"""Declares SmoothQuant."""

from quantizer.declarations import FIT_INPUTS, ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.smoothquant.settings:SmoothQuantConfig"
_SEARCH = "quantizer.algorithms.smoothquant.settings:STEP"
PLUGIN = Plugin(
    "smoothquant",
    rank=20,
    parts={FIT_INPUTS: "quantizer.algorithms.smoothquant.smoothquant:smooth_normalized_inputs"},
    search=_SEARCH,
    algorithms={"smoothquant": ListedAlgorithm(_SETTINGS, aliases=("smooth",))},
)
