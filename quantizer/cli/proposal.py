"""What `quantizer init --model` says of a preset and a model that do not suit each other.
Imports torch.
"""

from quantizer.cli.options import Options
from quantizer.cli.traced_model import traced_model
from quantizer.plan.remarks import behind_norms

STATIC = ("static",)
"""Strategies with one calibrated range for each input of a layer."""


def proposal(strategy: str | None, options: Options) -> str | None:
    """Which strategies to take instead, in a sentence; None where there is nothing to say.

    Raises:
        UsageError, ModelError, DataError: the model or its data cannot be opened or traced.
    """
    layers = behind_norms(traced_model(options).graph)
    if strategy not in STATIC or not layers:
        return None
    return (
        f"{len(layers)} linear layers read what a normalization makes, for example "
        f"{layers[0]}: some of its channels are far larger than the others, to which one "
        "static range leaves few codes. `--strategy dynamic` finds a range for each token, "
        "`--strategy smoothquant` moves the large channels into the weights; either loses "
        "less"
    )
