"""Declares the importance matrix."""

from quantizer.declarations import ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.imatrix.settings:IMatrixConfig"
PLUGIN = Plugin("imatrix", rank=24, algorithms={"imatrix": ListedAlgorithm(_SETTINGS)})
