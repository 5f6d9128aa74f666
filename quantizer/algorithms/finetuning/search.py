"""What a search for gates tries with fast finetuning. Imports no torch."""

from quantizer.config.algorithms import ConfigChange, ConfigStep

STEP = ConfigStep(
    "finetuning",
    "two networks in step, and a solution per layer",
    (
        ConfigChange("--fast_finetune adaround", fast_finetune="adaround"),
        ConfigChange("--fast_finetune adaquant", fast_finetune="adaquant"),
    ),
    place=4,
)
