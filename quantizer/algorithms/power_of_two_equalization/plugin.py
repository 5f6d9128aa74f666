"""Declares the equalization of channels by powers of two."""

from typing import Any

from quantizer.declarations import CalibrationStep, Plugin


def _may_apply(request: Any, state: Any) -> bool:
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


_STEP = CalibrationStep(
    "decide",
    "quantizer.algorithms.power_of_two_equalization.decision:POWER_OF_TWO_EQUALIZATION",
    when=_may_apply,
    keeps="levels",
)
PLUGIN = Plugin("power_of_two_equalization", rank=27, needs=("equalization",), steps=(_STEP,))
