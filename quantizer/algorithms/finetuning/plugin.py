"""Declares fast finetuning."""

from quantizer.declarations import CalibrationStep, Plugin

_STEP = CalibrationStep(
    "correct",
    "quantizer.algorithms.finetuning.network:run_finetuning",
    when=lambda request, state: bool(request.fast_finetune),
    keeps="fast_finetune",
    why_data="fast finetuning needs the values that layers read, and statistics do not hold "
    "them",
)
PLUGIN = Plugin("finetuning", rank=29, steps=(_STEP,))
