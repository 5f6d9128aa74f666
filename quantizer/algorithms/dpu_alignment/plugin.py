"""Declares the alignment of positions to the shifters of the DPU."""

from quantizer.declarations import CalibrationStep, Plugin

_STEP = CalibrationStep(
    "scale",
    "quantizer.algorithms.dpu_alignment.dpu_alignment:align_to_dpu",
    when=lambda request, state: state.plan.settings.target_device == "DPU",
)
PLUGIN = Plugin("dpu_alignment", rank=28, steps=(_STEP,))
