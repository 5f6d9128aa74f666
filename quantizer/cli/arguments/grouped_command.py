"""Defines commands and options of click with a help in sections. Files of the user's are not
written without permission, and options without effect are refused.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from quantizer.cli.arguments.places import OutputFile, require_free
from quantizer.cli.terminal.screen import COLORS, set_color, set_quiet, set_verbose
from quantizer.errors import UsageError
from quantizer.export.targets import CHOICES
from quantizer.storage.permission import replacing

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

_WORDS = "quantizer.words"
"""The words of a command line, in the context of click."""
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
}
"""Settings of each command: `-h`, and hyphens instead of underscores in options."""


class GroupedOption(click.Option):
    """An option that belongs to a section of the help.

    Attributes:
        group: the section.
        target: whose option it is: the help shows it if `--to` names that target. Empty for
            other options.
        old_names: further spellings, which the help leaves out.
    """

    def __init__(
        self,
        *names: Any,
        group: str = "",
        target: str = "",
        old_names: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__([*names[0], *old_names], **settings)
        self.group = group
        self.target = target
        self.old_names = old_names

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Return the default value, without the range of numbers."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value in the option's type.

        Raises:
            BadOptionUsage: it is another option, as in `--model --data x.npy`.
        """
        if isinstance(value, str) and value.startswith("--"):
            name = value.partition("=")[0]
            for parameter in ctx.command.params:
                if name in parameter.opts:
                    raise click.BadOptionUsage(self.opts[0], "needs a value", ctx)
        return super().type_cast_value(ctx, value)


_INPUTS = {
    "config_file",
    "data",
    "eval_data",
    "evaluate",
    "file",
    "files",
    "model",
    "preprocess",
    "tokenizer",
    "weights",
}
"""The options and arguments that name what a run reads, besides options of targets."""


class GroupedCommand(click.Command):
    """A command whose help has a section for each group of options.

    It also takes the options that all commands have. Before a subcommand they mean the same.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _screen_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command, and give errors about them its context."""
        ctx.meta[_WORDS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, which replaces no file of the user's without `--overwrite`, and no
        input at all.
        """
        inputs: list[str] = []
        files = {name for name, choice in CHOICES.items() if choice.is_file}
        for name in (_INPUTS | files) & ctx.params.keys():
            inputs += _paths_of(ctx.params[name])
        with replacing(overwrite=ctx.params.get("overwrite"), inputs=inputs):
            for parameter in self.params:
                path = ctx.params.get(parameter.name or "")
                if isinstance(parameter.type, OutputFile) and path:
                    require_free(path)
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in a section for each group."""
        # Only a help needs it
        from quantizer.cli.arguments.help_text import write_options

        words = ctx.meta.get(_WORDS, ())
        write_options(self.get_params(ctx), ctx, formatter, words)


def _paths_of(value: Any) -> list[str]:
    """Return the paths that the value of an option names. A file may have a function in it, and
    a pattern has a folder.
    """
    if value is None:
        return []
    paths: list[str] = []
    if isinstance(value, tuple):
        for item in value:
            paths += _paths_of(item)
        return paths
    file, _, _ = value.rpartition(":")
    before_pattern = re.split(r"[*?\[]", value, maxsplit=1)[0]
    paths += [value, file]
    if before_pattern != value:
        paths.append(os.path.dirname(before_pattern))
    return list(filter(None, paths))


def _screen_options() -> list[click.Parameter]:
    """Return the options of all commands."""
    make = functools.partial(GroupedOption, group="Output", expose_value=False, is_eager=True)
    quiet = make(
        ["--quiet", "-q"],
        is_flag=True,
        callback=set_quiet,
        help="Print no tables, no progress and no notes: only figures and verdicts.",
    )
    verbose = make(
        ["--verbose", "-v"],
        is_flag=True,
        callback=set_verbose,
        help="Print details on standard error: what is read, and how long each step takes.",
    )
    color = make(
        ["--color"],
        type=click.Choice(COLORS),
        callback=set_color,
        help="Colored output.  [default: auto]",
    )
    return [quiet, verbose, color]


command = functools.partial(click.command, cls=GroupedCommand, context_settings=SETTINGS)
"""Decorates a function that is a command."""


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
