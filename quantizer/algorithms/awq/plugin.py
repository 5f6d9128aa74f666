"""Declares AWQ."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.awq.settings:AWQConfig"
_SEARCH = "quantizer.algorithms.awq.settings:STEP"
PLUGIN = Plugin("awq", rank=22, search=_SEARCH, algorithms={"awq": ListedAlgorithm(_SETTINGS)})
