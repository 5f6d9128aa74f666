"""Refuses options on the command line that would have no effect."""

from collections.abc import Iterable

import click
from click.core import ParameterSource

from quantizer.errors import UsageError


def was_typed(ctx: click.Context, name: str) -> bool:
    """Return whether an option was given on the command line, not by a variable or default."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_typed(names: Iterable[str], why: str) -> None:
    """Raise `UsageError` for the first of these options that was given on the command line.

    Args:
        names: options that have no effect here.
        why: the reason, and what to do instead.
    """
    context = click.get_current_context()
    for name in names:
        if name not in context.params:
            continue
        if was_typed(context, name):
            raise UsageError(f"--{name} has no effect here", help=why)
