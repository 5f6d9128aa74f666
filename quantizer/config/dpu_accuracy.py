"""`--dpu_accuracy high`: all that makes a network on the DPU more accurate, by one word.

The DPU has one power-of-two scale per tensor, so a layer whose channels differ in range loses
most of its weights. Equalization makes the channels alike, finetuning learns the rounding, bias
correction takes care of what is left. Source: Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction" (2019), and "Up or Down? Adaptive Rounding for
Post-Training Quantization" (2020).
"""

from dataclasses import replace

from quantizer.config.model import Config
from quantizer.errors import UsageError

LEVELS = ("high",)
RAISED = ("include_cle", "include_bias_corr")
FINETUNING = "adaround"


def raised(config: Config, level: str | None) -> Config:
    """The config for a level of accuracy: itself, or with its layers equalized and its biases
    corrected.

    Raises:
        UsageError: a level that is unknown, or a config for another device.
    """
    if level is None:
        return config
    if level not in LEVELS:
        raise UsageError(
            f"dpu_accuracy={level!r} is no level", help=f"it is {', '.join(LEVELS)}, or None"
        )
    if config.settings.target_device != "DPU":
        raise UsageError(
            f"--dpu_accuracy {level} is for the DPU, and this config is for "
            f"{config.settings.target_device}",
            help="set include_cle and include_bias_corr in it, and add --fast_finetune",
        )
    # Not the file's
    places = {
        name: place for name, place in config.settings.places.items() if name not in RAISED
    }
    settings = replace(config.settings, include_cle=True, include_bias_corr=True, places=places)
    return replace(config, settings=settings)


def finetuning(level: str | None, asked: str | None) -> str | None:
    """How weights are finetuned at a level of accuracy, if the run does not say."""
    return asked or (FINETUNING if level else None)
