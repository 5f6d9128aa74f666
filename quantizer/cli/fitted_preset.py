"""Fits a preset to the model of `quantizer init --model`. Imports torch."""

from quantizer.cli.options import Options
from quantizer.cli.traced_model import traced_model
from quantizer.plan.fitted_config import fitted_text


def fitted_preset(text: str, name: str, options: Options) -> tuple[str, tuple[str, ...]]:
    """Return the text of a preset as it fits the model, and a sentence for each change.

    Raises:
        ConfigError, UsageError: the preset cannot be made to fit.
        ModelError, DataError: the model or its data cannot be opened or traced.
    """
    traced = traced_model(options)
    return fitted_text(text, name, traced.graph)
