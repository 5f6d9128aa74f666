"""Declares bias correction."""

from quantizer.declarations import CalibrationStep, Plugin

_STEP = CalibrationStep(
    "correct",
    "quantizer.algorithms.bias_correction.bias_correction:run_bias_correction",
    when=lambda request, state: bool(state.calibration.means),
    setting="include_bias_corr",
    why_data="bias correction needs the outputs of the quantized network, whose scales change",
)
_SEARCH = "quantizer.algorithms.bias_correction.bias_correction:STEP"
PLUGIN = Plugin("bias_correction", rank=30, steps=(_STEP,), search=_SEARCH)
