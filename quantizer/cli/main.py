"""The command `quantizer`: runs a subcommand, and turns each error into a message and an exit
code.
"""

import functools
import os
import re
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from quantizer import printable
from quantizer.cli.arguments.grouped_command import (
    NAMES_WIDTH,
    SETTINGS,
    GroupedCommand,
    was_typed,
)
from quantizer.cli.arguments.options import (
    QUANT_MODES,
    RUN,
    Options,
    each_option,
    takes,
    word_of,
)
from quantizer.cli.arguments.places import as_typed, enter_start_folder, from_start
from quantizer.cli.terminal import process, screen
from quantizer.cli.terminal.screen import print_versions
from quantizer.config.diagnostics import ConfigError
from quantizer.config.wording import closest_word
from quantizer.declarations import Command
from quantizer.errors import (
    TORCH,
    WORKER_HELP,
    DataError,
    ModelError,
    OutOfMemoryError,
    QuantizerError,
    ResultError,
    UsageError,
    lacks_memory,
    lost_worker,
)
from quantizer.plugins import commands, if_command, remedy_for_absent
from quantizer.printable import one_line
from quantizer.sources.user_code import ends_in_user_code, imported_once, user_error
from quantizer.storage import process_memory
from quantizer.storage.ownership import is_owned
from quantizer.storage.replacing import replace_file

_HERE = "quantizer.cli.config_commands"
_COMMANDS = {
    "validate": Command(
        f"{_HERE}:validate", "Check config files and list all their errors.", 4
    ),
    "explain": Command(
        f"{_HERE}:explain", "Explain an error code, a config key, or a layer's settings.", 6
    ),
    "schema": Command(
        f"{_HERE}:schema", "Print the JSON Schema of the config, for editors.", 16
    ),
    "help": Command(f"{_HERE}:help_command", "Show the help of a command.", 17),
}
"""The commands that are always there."""
_RUN_MODE = "quantizer.cli.modes.run_mode:run_mode"
_COMPLETION_VARIABLE = "_QUANTIZER_COMPLETE"
"""Shells set it to get completions."""
_EXAMPLE = re.compile(r"quantizer (\w+)")
_EPILOG = """\b
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
  143  terminated

\b
Environment variables set options: QUANTIZER_SEED=1 stands for --seed 1, and
QUANTIZER_EXPLAIN_MODEL=my_model.py for --model of `quantizer explain`."""


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
            near = closest_word(args[0], [*subcommands(), *QUANT_MODES])
            if near in QUANT_MODES:
                near = f"--quant_mode {near} …"
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
        """Write the lines of usage: one for modes, one for commands."""
        formatter.write_usage(
            "quantizer", f"--quant_mode {'|'.join(QUANT_MODES)} --model MODEL [OPTIONS]"
        )
        formatter.write_usage("quantizer", "COMMAND [ARGS]...", prefix="       ")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the program is for, without examples of commands that are not there."""
        lines = []
        for line in (self.help or "").splitlines():
            example = _EXAMPLE.match(line)
            if example is None or example[1] in subcommands():
                lines.append(line)
        self.help = "\n".join(lines)
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands before that of options. No command is imported."""
        rows = []
        for name, command in subcommands().items():
            rows.append((name.ljust(NAMES_WIDTH), command.help))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        super().format_options(ctx, formatter)


@click.group(
    cls=LazyCommands,
    invoke_without_command=True,
    context_settings={**SETTINGS, "auto_envvar_prefix": "QUANTIZER"},
    epilog=_EPILOG,
)
@takes(*RUN, config_file="The JSON config.  [default: a built-in one for the DPU]")
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
    """Quantize PyTorch models after training, configured by one JSON file.

    \b
    quantizer run my_model.py --to onnx

    In steps:

    \b
    quantizer init -o net.json
    quantizer plan --config_file net.json --model my_model.py
    quantizer --quant_mode calib --config_file net.json --model my_model.py
    quantizer --quant_mode test --config_file net.json --model my_model.py

    my_model.py is your file with two functions: model() returns a torch.nn.Module,
    calibration_data() an iterable of batches.
    """
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
                "missing --quant_mode", help="give --quant_mode float, calib or test"
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
        _show(
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
        code = _call(arguments)
    except click.ClickException as error:
        # Only errors need it
        from quantizer.cli.arguments.click_errors import explained

        message, remedy = explained(error)
        _show(one_line(message), one_line(remedy))
        return error.exit_code
    except click.Abort as error:
        # click raises it for the end of any file, too
        if isinstance(error.__cause__, EOFError):
            return _internal_error(error.__cause__, arguments)
        if isinstance(error.__context__, process.Terminated):
            click.echo(f"{process.cleared()}terminated", err=True)
            return 143
        click.echo(f"{process.cleared()}interrupted", err=True)
        return 130
    except ConfigError as error:
        # Only errors need it
        from quantizer.cli.terminal.render import print_diagnostics

        print_diagnostics(error.diagnostics, error.sources)
        return error.exit_code
    except QuantizerError as error:
        _show(error.message, error.help)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in TORCH:
            return _internal_error(error, arguments)
        # Only a plain install needs it
        from quantizer.installation import pip_line

        _show(
            f"this command needs the package {error.name}, which is not installed",
            pip_line("torch"),
        )
        return UsageError.exit_code
    except Exception as error:  # noqa: BLE001 - the user gets a message for any error
        text = lost_worker(error)
        if text is not None:
            _show(text, WORKER_HELP)
            return DataError.exit_code
        if ends_in_user_code(error):
            # A handler of a signal or a hook can run anywhere
            failure = user_error("your code", error, ModelError)
            _show(failure.message, failure.help)
            return failure.exit_code
        return _internal_error(error, arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and _COMPLETION_VARIABLE in os.environ:
            # click ends so after printing completions.
            raise
        # A property or hook of the model called exit().
        failure = user_error("the model", error, ModelError)
        _show(failure.message, failure.help)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _call(arguments: list[str]) -> Any:
    """Return the result of the command.

    Raises:
        OutOfMemoryError: there was not enough memory, even if the error was translated since.
    """
    try:
        return cli.main(arguments, prog_name="quantizer", standalone_mode=False)
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not lacks_memory(error):
            raise
        message = "out of memory"
        peak = process_memory.peak_bytes()
        if peak:
            message += f"; this process used up to {process_memory.size_text(peak)}"
        remedy = "use a smaller --batch_size or --memory" + if_command(
            "plan", "; `quantizer plan` with the same options predicts the memory of a run"
        )
        raise OutOfMemoryError(message, help=remedy) from error


def _show(message: str, help_text: str | None) -> None:
    label = click.style("error:", fg="red", bold=True)
    text = as_typed(message)
    click.echo(f"{label} {text}", err=True, color=screen.screen().is_colored)
    if help_text:
        click.echo(f"help: {as_typed(help_text)}", err=True)


def _internal_error(error: Exception, arguments: list[str]) -> int:
    """Print the error. Its traceback goes to run.log in the result folder, or with --debug to
    the screen.
    """
    details = printable.printable_lines("".join(traceback.format_exception(error)))
    where = "run it again with --debug to see the traceback"
    folder = _output_dir(arguments)
    if "--debug" in arguments:
        click.echo(details, err=True)
        where = "the traceback is above"
    elif folder is not None:
        with suppress(OSError, QuantizerError):
            _append(folder / "run.log", details)
            where = f"the traceback is in {folder / 'run.log'}"
    if isinstance(error, OSError):
        _show(
            one_line(f"a file was closed, replaced or removed during the run: {error}"),
            f"run it again while nothing else changes its files; {where}",
        )
        return ResultError.exit_code
    _show(
        one_line(f"internal error: {type(error).__name__}: {error}"),
        f"this is a bug of quantizer; {where}",
    )
    return QuantizerError.exit_code


def _append(path: Path, text: str) -> None:
    """Append to a file of a result folder.

    Raises:
        OSError: the folder is not one of quantizer's, or cannot be written.
    """
    if not is_owned(path.parent):
        raise FileNotFoundError(path)
    content = path.read_bytes() if path.exists() else b""
    replace_file(path, content + text.encode())


def _output_dir(arguments: list[str]) -> Path | None:
    """Return the folder of a run's run.log, if it exists."""
    context = cli.make_context("quantizer", list(arguments), resilient_parsing=True)
    params = context.params
    typed = params.get("report_dir") or params.get("output_dir") or "quantize_result"
    folder = from_start(typed)
    return folder if params.get("quant_mode") and folder.is_dir() else None
