"""The command `quantizer`: runs a subcommand, and returns its exit code."""

import functools
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from quantizer.cli.arguments.grouped_command import SETTINGS, GroupedCommand, was_typed
from quantizer.cli.arguments.options import RUN, Options, each_option, takes, word_of
from quantizer.cli.arguments.places import enter_start_folder
from quantizer.cli.terminal import process, screen
from quantizer.cli.terminal.screen import print_versions
from quantizer.config.wording import closest_word
from quantizer.declarations import Command
from quantizer.errors import ResultError, UsageError
from quantizer.plugins import commands, remedy_for_absent
from quantizer.sources.user_code import imported_once
from quantizer.storage import process_memory

_HERE = "quantizer.cli.config_commands"
_MODES = "quantizer.cli.modes.mode_commands"
_COMMANDS = {
    "validate": Command(
        f"{_HERE}:validate", "Check config files and list all their errors.", 4
    ),
    "explain": Command(
        f"{_HERE}:explain", "Explain an error code, a config key, or a layer's settings.", 6
    ),
    "calib": Command(
        f"{_MODES}:calib", "Calibrate: choose the scales of a config for a model.", 10
    ),
    "test": Command(f"{_MODES}:test", "Compare with float, and write files for engines.", 10),
    "float": Command(f"{_MODES}:float_command", "Measure the float model.", 10),
    "schema": Command(
        f"{_HERE}:schema", "Print the JSON Schema of the config, for editors.", 16
    ),
    "help": Command(f"{_HERE}:help_command", "Show the help of a command or topic.", 17),
}
"""The commands that are always there."""
_RUN_MODE = "quantizer.cli.modes.run_mode:run_mode"
_COMPLETION_VARIABLE = "_QUANTIZER_COMPLETE"
"""Shells set it to get completions."""


@functools.cache
def subcommands() -> dict[str, Command]:
    """Return all commands in the order of `--help`, which imports none of them."""
    found = {**_COMMANDS, **commands()}
    return dict(sorted(found.items(), key=lambda item: item[1].place))


class LazyCommands(GroupedCommand, click.Group):
    """A group that imports a subcommand when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        return list(subcommands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand and return it; return None if there is none of this name."""
        if cmd_name not in subcommands():
            return None
        command: click.Command = process.load(subcommands()[cmd_name].function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that the words begin with, and the words after it.

        Raises:
            UsageError: there is no such command; the nearest one is named.
        """
        if args[0] not in subcommands():
            near = closest_word(args[0], subcommands())
            remedy = f"`quantizer --help` lists all commands; {remedy_for_absent(args[0])}"
            if near is not None:
                remedy = f"did you mean `quantizer {near}`? {remedy}"
            raise UsageError(f"there is no command {args[0]!r}", help=remedy)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. For Ctrl-C, click would print an empty line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.Abort from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the subcommands and options that begin with a word. None is imported."""
        items = []
        for name, command in subcommands().items():
            if name.startswith(incomplete):
                items.append(CompletionItem(name, help=command.help))
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the line of usage."""
        formatter.write_usage("quantizer", "COMMAND [OPTIONS]")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the program is for, and the list of commands. None is imported."""
        # Only a help needs it
        from quantizer.cli.arguments.help_text import write_commands

        super().format_help_text(ctx, formatter)
        write_commands(subcommands(), formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: the options are those of commands."""


@click.group(
    cls=LazyCommands,
    invoke_without_command=True,
    context_settings={**SETTINGS, "auto_envvar_prefix": "QUANTIZER"},
)
@takes(*RUN)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    allow_from_autoenv=False,
    callback=print_versions,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context, /, options: Options) -> int | None:
    """Quantize PyTorch models after training, configured by one JSON file."""
    words = [word_of(name) for name, _ in each_option(RUN)]
    typed = [word for word in words if was_typed(ctx, word)]
    command = ctx.invoked_subcommand
    if command is not None:
        if "quant_mode" in typed:
            raise UsageError(
                f"--quant_mode and the command {command} exclude each other",
                help=f"leave out --quant_mode, or {command}",
            )
        if typed:
            raise UsageError(
                f"--{typed[0]} is before the command {command}, where it has no effect",
                help=f"write it after {command}",
            )
        return None
    if options.quant_mode is None:
        if typed:
            raise UsageError(
                "missing command",
                help="write one before the options: `quantizer calib` or `quantizer test`",
            )
        click.echo(ctx.get_help(), err=True)
        return UsageError.exit_code
    code: int | None = process.load(_RUN_MODE)(options)
    return code


def main() -> NoReturn:
    """Run the console script."""
    output = process.install()
    process.handle_termination()
    code = run_command(sys.argv[1:])
    # The interpreter would search all objects for cycles before it ends
    process_memory.stop_collecting()
    sys.stdout.flush()
    if output.lost is not None:
        reason = output.lost.strerror or output.lost
        # Only errors need it
        from quantizer.cli.failures import show_error

        show_error(
            f"standard output cannot be written: {reason}",
            "the printed text is lost, but the files of results are complete",
        )
        code = code or ResultError.exit_code
    # The interpreter would wait for exchanges with a lost rank.
    if code and process.is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Errors are printed on standard error."""
    enter_start_folder()
    with _voice(arguments), imported_once(), screen.new_screen():
        return _run(arguments)


def _voice(arguments: list[str]) -> AbstractContextManager[None]:
    """Let only the first of several ranks print."""
    if not process.is_rank():
        return nullcontext()
    from quantizer.cli.modes.torchrun import one_voice

    return one_voice(arguments)


def _run(arguments: list[str]) -> int:
    """Run a command, print its error, and return the exit code."""
    try:
        code = cli.main(arguments, prog_name="quantizer", standalone_mode=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and _COMPLETION_VARIABLE in os.environ:
            # click ends so after printing completions.
            raise
        # Only errors need it
        from quantizer.cli.failures import reported

        return reported(error, arguments, cli)
    return code if isinstance(code, int) else 0
