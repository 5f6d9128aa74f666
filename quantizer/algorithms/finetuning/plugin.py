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
_HELP = (
    "Also learn how to round each weight, layer by layer (adaround, the default), or the "
    "scales too (adaquant)."
)
_SEARCH = "quantizer.algorithms.finetuning.network:STEP"
PLUGIN = Plugin(
    "finetuning", rank=29, steps=(_STEP,), search=_SEARCH, options={"fast_finetune": _HELP}
)
