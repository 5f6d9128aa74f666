"""Declares SmoothQuant."""

from quantizer.declarations import FIT_INPUTS, ConfigChange, ConfigStep, ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.smoothquant.settings:SmoothQuantConfig"
_ENTRY = {"name": "smoothquant", "alpha": 0.5, "online": False}
_SEARCH = ConfigStep(
    "smoothing",
    "a pass over the data, with alpha auto several",
    (
        ConfigChange("SmoothQuant, alpha 0.5", algorithm=_ENTRY, needs_activations=True),
        ConfigChange(
            "SmoothQuant, alpha auto",
            algorithm={**_ENTRY, "alpha": "auto"},
            needs_activations=True,
        ),
    ),
    place=3,
)
PLUGIN = Plugin(
    "smoothquant",
    rank=20,
    parts={FIT_INPUTS: "quantizer.algorithms.smoothquant.fitting:smooth_normalized_inputs"},
    search=(_SEARCH,),
    algorithms={"smoothquant": ListedAlgorithm(_SETTINGS, aliases=("smooth",))},
)
