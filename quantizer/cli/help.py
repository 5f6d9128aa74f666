"""How `--help` looks: options in named groups below those without one, all descriptions in one column."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

GROUPS = ("", "Model", "Data", "Algorithm", "Output", "Debugging")
NAMES_WIDTH = 20
"""Longer names have a line of their own, with the description below."""


class GroupedOption(click.Option):
    """An option under a heading of the help."""

    def __init__(self, *names: Any, group: str = "", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """The default, but not that N is at least 1."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class GroupedCommand(click.Command):
    """A command whose help has a section for each group of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", "")].append(record)
        for group, rows in filter(operator.itemgetter(1), groups.items()):
            with formatter.section(group or "Options"):
                # The width of a column is that of its longest name, so one name as wide as allowed aligns all sections.
                (name, text), *rest = rows
                formatter.write_dl([(name.ljust(NAMES_WIDTH), text), *rest], col_max=NAMES_WIDTH)


def was_typed(ctx: click.Context, name: str) -> bool:
    """Whether an option comes from the command line, and not from a variable or a default."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
