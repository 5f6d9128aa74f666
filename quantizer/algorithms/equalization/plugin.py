"""Declares cross-layer equalization, the absorption of high biases after it, and the
equalization of channels by powers of two.
"""

from typing import Any

from quantizer.declarations import CalibrationStep, GraphPass, ListedAlgorithm, Plugin

_FOLDER = "quantizer.algorithms.equalization"
_ABSORPTION = f"{_FOLDER}.absorption"


def _may_level(request: Any, state: Any) -> bool:
    """Return whether a layer reads its channels one by one, or several channels of inputs."""
    if not state.target.is_traced:
        return False
    # Those of plans, which each calibration has imported
    from quantizer.graph.edits import reads_one_by_one
    from quantizer.plan.readers import input_readers

    graph = state.plan.graph
    if input_readers(graph):
        return True
    return any(reads_one_by_one(graph, node) for node in graph.nodes)


_EQUALIZE = GraphPass(
    f"{_FOLDER}.equalization:cross_layer_equalization",
    setting="include_cle",
    summary="pairs of layers equalized: {count}; largest factor 2^{amount:.1f}",
)
# Outputs differ where a value lies more than three standard deviations below its mean
_ABSORB = GraphPass(
    f"{_ABSORPTION}:absorb_high_biases",
    setting="include_cle",
    changes="tails",
    tolerance=0.05,
    summary="layers whose high biases the next one absorbs: {count}; most channels "
    "{amount:.0f}",
    decision="absorption",
    decide=f"{_ABSORPTION}:decide_absorption",
)
_DECIDE_ABSORPTION = CalibrationStep(
    "decide",
    f"{_ABSORPTION}:ABSORPTION",
    when=lambda request, state: bool(request.config.settings.include_cle),
    keeps="absorption",
)
_DECIDE_LEVELS = CalibrationStep(
    "decide",
    f"{_FOLDER}.powers_of_two:POWER_OF_TWO_EQUALIZATION",
    when=_may_level,
    keeps="levels",
)
PLUGIN = Plugin(
    "equalization",
    rank=25,
    algorithms={"cle": ListedAlgorithm(f"{_FOLDER}.settings:CLEConfig", switch="include_cle")},
    search=f"{_FOLDER}.settings:STEP",
    passes={"cross_layer_equalization": _EQUALIZE, "absorb_high_biases": _ABSORB},
    steps=(_DECIDE_ABSORPTION, _DECIDE_LEVELS),
)
