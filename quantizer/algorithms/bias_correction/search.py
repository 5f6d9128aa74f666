"""What a search for gates tries with bias correction. Imports no torch."""

from quantizer.config.algorithms import ConfigChange, ConfigStep

STEP = ConfigStep(
    "bias correction",
    "a second pass over the data",
    (ConfigChange("biases corrected", setting="include_bias_corr"),),
    place=1,
)
