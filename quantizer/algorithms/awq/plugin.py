"""Declares AWQ."""

from quantizer.declarations import ConfigChange, ConfigStep, ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.awq.settings:AWQConfig"
_ENTRY = {"name": "awq", "online": False}
_SEARCH = ConfigStep(
    "smoothing",
    "a pass over the data",
    (ConfigChange("AWQ", algorithm=_ENTRY, needs_activations=False),),
    place=3,
)
PLUGIN = Plugin(
    "awq", rank=22, search=(_SEARCH,), algorithms={"awq": ListedAlgorithm(_SETTINGS)}
)
