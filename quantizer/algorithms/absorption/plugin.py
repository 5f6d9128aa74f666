"""Declares the absorption of high biases."""

from quantizer.declarations import CalibrationStep, GraphPass, Plugin

_MODULE = "quantizer.algorithms.absorption.absorption"
# Outputs differ where a value lies more than three standard deviations below its mean
_PASS = GraphPass(
    f"{_MODULE}:absorb_high_biases",
    setting="include_cle",
    changes="tails",
    tolerance=0.05,
    summary="layers whose high biases the next one absorbs: {count}; most channels "
    "{amount:.0f}",
    decision="absorption",
    decide=f"{_MODULE}:decide_absorption",
)
_STEP = CalibrationStep(
    "decide",
    f"{_MODULE}:ABSORPTION",
    when=lambda request, state: bool(request.config.settings.include_cle),
    keeps="absorption",
)
PLUGIN = Plugin(
    "absorption",
    rank=26,
    needs=("equalization",),
    passes={"absorb_high_biases": _PASS},
    steps=(_STEP,),
)
