"""Turns each error into a message, which says what to do, and into an exit code."""

import re
import traceback
from contextlib import suppress
from pathlib import Path

import click

from quantizer import printable
from quantizer.cli.arguments.places import PluginWord, as_typed, from_start
from quantizer.cli.terminal import process, screen
from quantizer.cli.terminal.render import print_diagnostics
from quantizer.config.diagnostics import ConfigError
from quantizer.config.wording import closest_word, listed
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
from quantizer.export.destinations import ALSO, DESTINATIONS
from quantizer.installation import pip_line
from quantizer.plugins import if_command, remedy_for_absent
from quantizer.printable import one_line
from quantizer.sources.user_code import ends_in_user_code, user_error
from quantizer.storage import process_memory
from quantizer.storage.ownership import is_owned
from quantizer.storage.replacing import replace_file

_REFUSED_CHOICE = re.compile(r"'(.*)' is not (?:one of )?(?:'|$)")
"""The beginning of click's message about a value that is not a choice."""
_NUMBERS = {
    "a valid integer range": "a whole number",
    "a valid integer": "a whole number",
    "a valid float": "a number",
}
"""Click's words for numbers, and ours."""


def reported(error: BaseException, arguments: list[str], cli: click.Group) -> int:
    """Print the error of a command, and return its exit code.

    Args:
        error: any but KeyboardInterrupt.
        arguments: the words of the command line.
        cli: the command that they call.
    """
    if isinstance(error, click.Abort):
        return _stopped(error, arguments, cli)
    is_translated = isinstance(error, OutOfMemoryError)
    if isinstance(error, Exception) and lacks_memory(error) and not is_translated:
        error = _out_of_memory()
    if isinstance(error, ConfigError):
        print_diagnostics(error.diagnostics, error.sources)
        return error.exit_code
    if isinstance(error, click.ClickException):
        message, remedy = explained(error)
        show_error(one_line(message), one_line(remedy))
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in TORCH:
        message = f"this command needs the package {error.name}, which is not installed"
        error = UsageError(message, help=pip_line("torch"))
    if not isinstance(error, Exception):
        # A property or hook of the model called exit().
        error = user_error("the model", error, ModelError)
    if not isinstance(error, QuantizerError):
        text = lost_worker(error)
        if text is not None:
            error = DataError(text, help=WORKER_HELP)
        elif ends_in_user_code(error):
            # A handler of a signal or a hook can run anywhere
            error = user_error("your code", error, ModelError)
        else:
            return _internal_error(error, arguments, cli)
    show_error(error.message, error.help)
    return error.exit_code


def _stopped(error: click.Abort, arguments: list[str], cli: click.Group) -> int:
    """Print why a command was stopped, and return the exit code."""
    # click raises it for the end of any file, too
    if isinstance(error.__cause__, EOFError):
        return _internal_error(error.__cause__, arguments, cli)
    if isinstance(error.__context__, process.Terminated):
        click.echo(f"{process.cleared()}terminated", err=True)
        return 143
    click.echo(f"{process.cleared()}interrupted", err=True)
    return 130


def _out_of_memory() -> OutOfMemoryError:
    """Return the error about memory, with what the process used."""
    message = "out of memory"
    peak = process_memory.peak_bytes()
    if peak:
        message += f"; this process used up to {process_memory.size_text(peak)}"
    remedy = "use a smaller --batch_size or --memory" + if_command(
        "plan", "; `quantizer plan` with the same options predicts the memory of a run"
    )
    return OutOfMemoryError(message, help=remedy)


def show_error(message: str, help_text: str | None) -> None:
    """Print an error and its help on standard error."""
    label = click.style("error:", fg="red", bold=True)
    text = as_typed(message)
    click.echo(f"{label} {text}", err=True, color=screen.screen().is_colored)
    if help_text:
        click.echo(f"help: {as_typed(help_text)}", err=True)


def _internal_error(error: Exception, arguments: list[str], cli: click.Group) -> int:
    """Print the error. Its traceback goes to run.log in the result folder, or with --debug to
    the screen.
    """
    details = printable.printable_lines("".join(traceback.format_exception(error)))
    where = "run it again with --debug to see the traceback"
    folder = _output_dir(arguments, cli)
    if "--debug" in arguments:
        click.echo(details, err=True)
        where = "the traceback is above"
    elif folder is not None:
        with suppress(OSError, QuantizerError):
            _append(folder / "run.log", details)
            where = f"the traceback is in {folder / 'run.log'}"
    if isinstance(error, OSError):
        show_error(
            one_line(f"a file was closed, replaced or removed during the run: {error}"),
            f"run it again while nothing else changes its files; {where}",
        )
        return ResultError.exit_code
    show_error(
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


def _output_dir(arguments: list[str], cli: click.Group) -> Path | None:
    """Return the folder of a run's run.log, if it exists."""
    context = cli.make_context("quantizer", list(arguments), resilient_parsing=True)
    params = context.params
    if params.get("quant_mode") is None:
        name, *rest = arguments or [""]
        command = cli.get_command(context, name)
        if command is None or "output_dir" not in [option.name for option in command.params]:
            return None
        params = command.make_context(name, rest, resilient_parsing=True).params
    typed = params.get("report_dir") or params.get("output_dir") or "quantize_result"
    folder = from_start(typed)
    return folder if folder.is_dir() else None


def explained(error: click.ClickException) -> tuple[str, str]:
    """Return the message and the help of an error that click has raised.

    >>> explained(click.UsageError("Got unexpected extra argument (net.json)."))
    ('got unexpected extra argument (net.json)', 'write quantizer [OPTIONS]')
    """
    context: click.Context | None = getattr(error, "ctx", None)
    if context is None:
        context = click.Context(click.Command("quantizer"), info_name="quantizer")
    usage = f"`{context.command_path} --help` lists all options"
    if context.parent is None:
        usage = "`quantizer calib --help` and `quantizer test --help` list the options of modes"
    form = f"write {' '.join(context.get_usage().removeprefix('Usage:').split())}"
    parameters = context.command.get_params(context)
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error.option_name, context, options, usage)
    if isinstance(error, click.BadOptionUsage):
        for option in options:
            if error.option_name in (*option.opts, option.name):
                return _misused_option(option, context)
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        return f"missing {_name_of(error.param)}", form
    elif isinstance(error, click.BadParameter) and error.param is not None:
        return _refused_value(error.message, error.param, context, usage)
    else:
        usage = form
    # As our messages: no capital, no full stop
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:], usage


def _unknown_option(
    written: str, context: click.Context, options: list[click.Option], remedy: str
) -> tuple[str, str]:
    message = f"there is no option {written}"
    if context.parent is not None:
        message = f"{context.command_path} has no option {written}"
    spellings: list[str] = []
    for option in options:
        spellings += option.opts + option.secondary_opts
    near = closest_word(written, spellings)
    word = written.lstrip("-").replace("_", "-").lower()
    names = {name.replace("_", "-"): name for name in (*DESTINATIONS, *ALSO)}
    if word in names and "--to" in spellings:
        near = f"--to {names[word]}"
    if near is not None:
        remedy = f"did you mean {near}? {remedy}"
    return message, remedy


def _misused_option(option: click.Option, context: click.Context) -> tuple[str, str]:
    name = option.opts[0]
    if option.is_flag:
        return f"{name} takes no value", f"write {name} alone: {option.help}"
    return f"{name} needs a value", _example(option, context)


def _refused_value(
    reason: str, parameter: click.Parameter, context: click.Context, remedy: str
) -> tuple[str, str]:
    """Return the sentence and the remedy for a value that an option or argument refuses."""
    reason = reason.rstrip(".")
    for words, plain_words in _NUMBERS.items():
        if reason.endswith(f"is not {words}"):
            reason = reason.removesuffix(words) + plain_words
    if isinstance(parameter, click.Option):
        remedy = _example(parameter, context)
    written = _REFUSED_CHOICE.match(reason)
    if written and isinstance(parameter.type, click.Choice):
        choices = [str(choice) for choice in parameter.type.choices]
        reason = f"{written[1]!r} is not one of its values"
        near = closest_word(written[1], choices)
        remedy = f"known are {listed(choices)}" if choices else "there is none"
        if near is not None:
            remedy = f"did you mean {near}? {remedy}"
        elif isinstance(parameter.type, PluginWord):
            remedy += f"; {remedy_for_absent(written[1])}"
    return f"{_name_of(parameter)}: {reason}", remedy


def _name_of(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return parameter.opts[0]
    return parameter.human_readable_name


def _example(option: click.Option, context: click.Context) -> str:
    """Return how an option is written, and what it is for."""
    return f"write {option.opts[0]} {option.make_metavar(context)}: {option.help}"
