"""`quantizer inspect`: the layers of a model, with the names a config may use, and what can be quantized."""

from __future__ import annotations

from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.options import SETTINGS, ModelOptions, model_options
from quantizer.engine.files import write_bytes
from quantizer.graph.emit import emit
from quantizer.report import tables


@click.command(context_settings=SETTINGS)
@model_options
def inspect(options: ModelOptions) -> None:
    """Show each layer's name, operator and output shape, what is quantized, and why the rest is not.

    With -o FILE.py also write the network as readable code, as calibration does.

    \b
    quantizer inspect --model examples/digits.py
    """
    read = session.read_config(options.config_file)
    with session.told_notes(options.json):
        loaded = session.open_model(options)
        original = session.trace_model(options, loaded, session.open_data(options, loaded))
    plan = session.make_plan(read, original, quiet=True)
    if options.json:
        click.echo(session.as_json(plan.to_json() | {"float": dict(plan.floats)}))
    else:
        session.console().print(tables.layer_table(plan.graph, plan.tensors, plan.floats))
        if left := session.left_float(plan):
            click.echo(left)
    if options.output and options.output != "-":
        write_bytes(Path(options.output), emit(plan.graph).encode())
