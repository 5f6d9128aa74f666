"""Writes the texts of `--help`, and defines `quantizer help`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import click

from quantizer.cli.arguments.grouped_command import WORDS, GroupedOption, command
from quantizer.config.wording import closest_word, quoted
from quantizer.declarations import Command
from quantizer.errors import UsageError
from quantizer.export.destinations import ALSO, DESTINATIONS, possible_targets

_GROUPS = ("", "Model", "Data", "Algorithm", "Output", "Debugging")
_NAMES_WIDTH = 20
"""Longer names have a line of their own, with the description below."""
_START = """quantizer run my_model.py --to onnx

my_model.py is your file with two functions: model() returns a torch.nn.Module,
calibration_data() an iterable of batches."""
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
_EXIT_CODES = """\
Exit codes:
  0    success
  1    a check failed: a config has errors, or a --gate does not hold
  2    wrong usage, or a config that cannot be used
  3    an error of the model
  4    an error of the data
  5    an error of the result folder
  6    out of memory
  40   another process of torchrun was lost
  70   an internal error of quantizer
  130  interrupted (Ctrl-C)
  143  terminated"""
_VARIABLES = """\
Environment variables set options. QUANTIZER_PLAN_MODEL=my_model.py stands for --model of
`quantizer plan`, and QUANTIZER_SEED=1 for --seed 1 with --quant_mode."""
_TOPICS = {"exit-codes": _EXIT_CODES, "variables": _VARIABLES}
"""The texts of `quantizer help`, besides those of commands."""


def write_commands(commands: Mapping[str, Command], formatter: click.HelpFormatter) -> None:
    """Write a first example, the list of commands, and the options that are of no command."""
    first, _, rest = _START.partition("\n\n")
    steps = [name for name in _STEPS if name in commands]
    with formatter.indentation():
        if first.split()[1] in commands:
            formatter.write_paragraph()
            formatter.write_text(first)
        formatter.write_paragraph()
        formatter.write_text(f"{rest} In steps: {', '.join(steps)}.")
    with formatter.section("Commands"):
        formatter.write_dl([(name, row.help) for name, row in commands.items()])
    with formatter.section("Options"):
        formatter.write_dl(_OPTIONS)
    formatter.write_paragraph()
    formatter.write_text("Topics: `quantizer help exit-codes`, `quantizer help variables`.")


def write_options(
    parameters: Iterable[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Write options in a section for each group. Those of a target are there if the command
    line names it.
    """
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in _GROUPS}
    named = _named_targets(ctx.meta.get(WORDS, ()))
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
    if not isinstance(parameter, GroupedOption):
        return parameter.get_help_record(ctx)
    names = parameter.opts
    parameter.opts = [name for name in names if name not in parameter.old_names]
    try:
        return parameter.get_help_record(ctx)
    finally:
        parameter.opts = names


@command()
@click.argument("name", metavar="[COMMAND]", required=False)
@click.pass_context
def help_command(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of all of them; or a topic, exit-codes or variables.

    \b
    quantizer help
    quantizer help plan
    quantizer help exit-codes
    """
    root = ctx.find_root()
    if name is None:
        click.echo(root.get_help())
        return
    topic = _TOPICS.get(name.replace("_", "-"))
    if topic is not None:
        click.echo(topic)
        return
    group = root.command
    assert isinstance(group, click.Group)
    shown = group.get_command(root, name)
    if shown is None:
        near = closest_word(name, [*group.list_commands(root), *_TOPICS])
        remedy = "`quantizer help` lists all commands, `quantizer explain` all config keys"
        if near is not None:
            remedy = f"did you mean `quantizer help {near}`? {remedy}"
        raise UsageError(f"there is no command {quoted(name)}", help=remedy)
    with click.Context(shown, info_name=name, parent=root) as context:
        click.echo(shown.get_help(context))
