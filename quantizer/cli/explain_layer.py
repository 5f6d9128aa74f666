"""`quantizer explain --model M LAYER`: what holds for one layer, and the file and line each value came from."""

from __future__ import annotations

import click

from quantizer.cli import session
from quantizer.cli.options import ModelOptions
from quantizer.config.model import Selector
from quantizer.errors import UsageError
from quantizer.plan.match import closest, match
from quantizer.plan.model import TensorPlan


def explain_layer(name: str, options: ModelOptions) -> None:
    """Print the effective spec of each tensor of a layer, value by value with its origin.

    Raises:
        UsageError: no layer has this name.
    """
    read = session.read_config(options.config_file)
    with session.told_notes(quiet=True):
        loaded = session.open_model(options)
        original = session.trace_model(options, loaded, session.open_data(options, loaded))
    plan = session.make_plan(read, original, quiet=True)
    selector = Selector("name", name)
    layers = match(selector, plan.graph, original).layers
    if not layers:
        near = ", ".join(closest(selector, original)) or "`quantizer inspect` lists all layers"
        raise UsageError(f"no layer is called {name!r}", help=f"closest: {near}")
    if options.json:
        found = {n: {role: t.to_json() for role, t in plan.of_layer(n).items()} for n in layers}
        click.echo(session.as_json(found))
        return
    for layer in layers:
        click.echo(layer)
        for role, tensor in plan.of_layer(layer).items():
            click.echo(f"  {role}" + _shared(tensor))
            for field, origin in tensor.origins.items():
                click.echo(f"    {field:<12} {getattr(tensor.spec, field)!s:<12} {origin}")
        for role in (role for name, role in plan.off if name == layer):
            click.echo(f"  {role}: float: float32 at {plan.off[layer, role]}")
        if layer in plan.floats:
            click.echo(f"  activation: float: {plan.floats[layer]}")


def _shared(tensor: TensorPlan) -> str:
    others = [name for name in tensor.members if name != tensor.layer]
    return f" (shared with {', '.join(others)})" if others else ""
