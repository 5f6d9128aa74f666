"""Declares AWQ."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.awq.settings:AWQConfig"
PLUGIN = Plugin("awq", rank=22, algorithms={"awq": ListedAlgorithm(_SETTINGS)})
