"""Which options somebody typed, and the refusal of those that would change nothing."""

from collections.abc import Iterable

import click
from click.core import ParameterSource

from quantizer.errors import UsageError


def was_typed(ctx: click.Context, name: str) -> bool:
    """Whether an option comes from the command line, and not from a variable or a default."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_typed(names: Iterable[str], why: str) -> None:
    """Refuse options that were typed and would change nothing.

    Raises:
        UsageError: the first of them.
    """
    context = click.get_current_context()
    for name in names:
        if name in context.params and was_typed(context, name):
            raise UsageError(f"--{name} has no effect here", help=why)
