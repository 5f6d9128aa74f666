"""Fits a preset to the model of `quantizer init --model`. Imports torch."""

from quantizer.cli.options import Options
from quantizer.cli.traced_model import traced_model
from quantizer.config.document.document import Text
from quantizer.config.document.read import parse_document
from quantizer.config.document.rewrite import rewritten
from quantizer.config.load import load_text
from quantizer.plan.fitted_config import fitted_document


def fitted_preset(
    text: str,
    name: str,
    options: Options,
) -> tuple[str, tuple[str, ...]]:
    """Return the text of a preset as it fits the model, and a sentence for each change.

    Raises:
        ConfigError, UsageError: the preset cannot be made to fit.
        ModelError, DataError: the model or its data cannot be opened or traced.
    """
    source = Text(name, text)
    document = parse_document(source)
    traced = traced_model(options)
    fitted = fitted_document(
        document.value,
        traced.graph,
        name=name,
    )
    changed = rewritten(document, fitted.document)
    result = load_text(Text(name, changed))
    result.require()
    return changed, fitted.changes
