"""What a search for gates tries with SmoothQuant. Imports no torch."""

from quantizer.config.search_steps import ConfigChange, ConfigStep

_ENTRY = {"name": "smoothquant", "alpha": 0.5, "online": False}
STEP = ConfigStep(
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
