"""Declares cross-layer equalization."""

from quantizer.declarations import GraphPass, ListedAlgorithm, Plugin

_SETTINGS = "quantizer.algorithms.equalization.settings:CLEConfig"
_PASS = GraphPass(
    "quantizer.algorithms.equalization.equalization:cross_layer_equalization",
    setting="include_cle",
    summary="pairs of layers equalized: {count}; largest factor 2^{amount:.1f}",
)
_SEARCH = "quantizer.algorithms.equalization.search:STEP"
PLUGIN = Plugin(
    "equalization",
    rank=25,
    algorithms={"cle": ListedAlgorithm(_SETTINGS, switch="include_cle")},
    search=_SEARCH,
    passes={"cross_layer_equalization": _PASS},
)
