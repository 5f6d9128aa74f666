"""Writes the texts of `--help`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import click

from quantizer.declarations import Command
from quantizer.export.destinations import (
    ALSO,
    DESTINATIONS,
    NETWORK,
    destination_for,
    possible_targets,
)

_GROUPS = ("", "Model", "Data", "Algorithm", "Output", "Debugging")
_NAMES_WIDTH = 20
"""Longer names have a line of their own, with the description below."""
_MODEL = (
    "my_model.py is your file with two functions: model() returns a torch.nn.Module, "
    "calibration_data() an iterable of batches."
)
_STEPS = ("init", "plan", "calib", "test")
"""The commands that do what `run` does."""
_OPTIONS = (
    (
        "--quant_mode MODE",
        "As the command calib, test or float. Without a config, calib takes "
        "the DPU's here, and the CPU's as a command.",
    ),
    ("--version", "Show the version."),
    ("-h, --help", "Show this text, or the options of a command."),
)
"""The rows of options in the help of all commands."""


def write_commands(commands: Mapping[str, Command], formatter: click.HelpFormatter) -> None:
    """Write a first example, the list of commands, and the options that are of no command."""
    steps = [name for name in _STEPS if name in commands]
    destination = destination_for(NETWORK)
    with formatter.indentation():
        if destination and "run" in commands:
            formatter.write_paragraph()
            formatter.write_text(f"quantizer run my_model.py --to {destination}")
        formatter.write_paragraph()
        formatter.write_text(f"{_MODEL} In steps: {', '.join(steps)}.")
    with formatter.section("Commands"):
        formatter.write_dl([(name, row.help) for name, row in commands.items()])
    with formatter.section("Options"):
        formatter.write_dl(_OPTIONS)
    formatter.write_paragraph()
    formatter.write_text("Topics: `quantizer help exit-codes`, `quantizer help variables`.")


def write_options(
    parameters: Iterable[click.Parameter],
    ctx: click.Context,
    formatter: click.HelpFormatter,
    words: Sequence[str],
) -> None:
    """Write options in a section for each group. Those of a target are there if the words of
    the command line name it.
    """
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in _GROUPS}
    named = _named_targets(words)
    has_more = False
    for parameter in parameters:
        record = _record(parameter, ctx)
        target = getattr(parameter, "target", "")
        if target and target not in named:
            has_more = True
        elif record is not None and isinstance(parameter, click.Option):
            name, text = record
            # One name as wide as allowed makes the columns of all sections equally wide.
            row = (name.ljust(_NAMES_WIDTH), text)
            groups[getattr(parameter, "group", "")].append(row)
    for group, rows in groups.items():
        if rows:
            with formatter.section(group or "Options"):
                formatter.write_dl(rows, col_max=_NAMES_WIDTH)
    if has_more and not named:
        formatter.write_paragraph()
        line = f"`{ctx.command_path} --to NAME --help` shows the options of NAME, too."
        formatter.write_text(line)


def _named_targets(words: Sequence[str]) -> list[str]:
    """Return the targets that `--to` may stand for in the words of a command line."""
    named: list[str] = []
    for option, word in pairwise([*" ".join(words).replace("=", " ").split(), ""]):
        if option == "--to" and word.lower() in (*DESTINATIONS, *ALSO):
            named += possible_targets([word])
    return named


def _record(parameter: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """Return the names and the help of an option, without its old names."""
    names = parameter.opts
    old_names = getattr(parameter, "old_names", ())
    parameter.opts = [name for name in names if name not in old_names]
    try:
        return parameter.get_help_record(ctx)
    finally:
        parameter.opts = names
