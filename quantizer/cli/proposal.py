"""Proposes another strategy in `quantizer init --model`, if one suits the model better. Imports
torch.
"""

from quantizer.cli.options import Options
from quantizer.cli.traced_model import traced_model
from quantizer.config.wording import counted
from quantizer.plan.remarks import behind_norms


def proposal(strategy: str | None, options: Options) -> str | None:
    """Return sentences on better strategies; None if the strategy suits the model.

    Raises:
        UsageError, ModelError, DataError: the model or its data cannot be opened or traced.
    """
    layers = behind_norms(traced_model(options).graph)
    if strategy != "static" or not layers:
        return None
    return (
        f"{counted(len(layers), 'linear layer')} with a normalization in front, for example "
        f"{layers[0]}. A few channels there are usually far larger than the others, and one "
        "static range leaves few codes for the others. Two strategies lose less: `--strategy "
        "dynamic` computes a range for each token, `--strategy smoothquant` moves the large "
        "channels into the weights"
    )
