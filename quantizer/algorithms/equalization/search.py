"""What a search for gates tries with cross-layer equalization. Imports no torch."""

from quantizer.config.search_steps import ConfigChange, ConfigStep

STEP = ConfigStep(
    "equalization",
    "a calibration; nothing at run time",
    (ConfigChange("neighbouring layers equalized", algorithm={"name": "cle"}),),
    place=2,
)
