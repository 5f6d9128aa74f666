"""What a search for gates tries with AWQ. Imports no torch."""

from quantizer.config.search_steps import ConfigChange, ConfigStep

_ENTRY = {"name": "awq", "online": False}
STEP = ConfigStep(
    "smoothing",
    "a pass over the data",
    (ConfigChange("AWQ", algorithm=_ENTRY, needs_activations=False),),
    place=3,
)
