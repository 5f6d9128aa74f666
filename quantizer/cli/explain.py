"""`quantizer explain`: the page of a code or of a config key, or what holds for one layer."""

from __future__ import annotations

import importlib

import click

from quantizer.cli.options import SETTINGS, ModelOptions, model_options
from quantizer.config.codes import all_codes
from quantizer.config.pages import code_page, key_names, key_page
from quantizer.config.wording import closest
from quantizer.errors import UsageError


@click.command(context_settings=SETTINGS)
@click.argument("name", metavar="CODE|KEY|LAYER")
@model_options
def explain(name: str, options: ModelOptions) -> int | None:
    """Explain a code such as QZ301, a config key such as round_mode, or, with --model, what holds for one layer.

    \b
    quantizer explain QZ301
    quantizer explain round_mode
    quantizer explain --config configs/example.json --model examples/digits.py layer1.0.conv1
    """
    if options.model is not None:
        layers = importlib.import_module("quantizer.cli.explain_layer")
        code: int | None = layers.explain_layer(name, options)
        return code
    if name.upper() in all_codes():
        click.echo(code_page(name.upper()), nl=False)
    elif name in key_names():
        click.echo(key_page(name), nl=False)
    else:
        near = closest(name, [*key_names(), *all_codes()])
        remedy = f'did you mean "{near}"?' if near else "give --model to ask about a layer"
        raise UsageError(f'there is no code and no config key "{name}"', help=remedy)
    return None
