"""The command `quantizer`: finds the subcommand, and turns every error into a sentence and an
exit code.
"""

import errno
import importlib
import io
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from quantizer import __version__, printable
from quantizer.cli import interrupts, streams, torchrun
from quantizer.cli.options import (
    NAMES_WIDTH,
    QUANT_MODES,
    RUN,
    SETTINGS,
    GroupedCommand,
    GroupedOption,
    Options,
    takes,
    word_of,
)
from quantizer.cli.render import print_diagnostics
from quantizer.cli.typed import was_typed
from quantizer.config.diagnostics import ConfigError
from quantizer.config.wording import closest
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
    pip_line,
)
from quantizer.printable import one_line
from quantizer.sources.user_code import imported_once, raised
from quantizer.storage import process_memory
from quantizer.storage.atomic_write import replace_file

COMMANDS = {
    "init": ("quantizer.cli.init:init", "Write a config to start from."),
    "validate": (
        "quantizer.cli.validate:validate",
        "Check config files and list all their errors.",
    ),
    "convert": ("quantizer.cli.convert:convert", "Write a config in the other form."),
    "explain": (
        "quantizer.cli.explain:explain",
        "Explain an error code, a config key, or a layer's settings.",
    ),
    "doctor": (
        "quantizer.cli.doctor:doctor",
        "Check machine, config, data and model before a run.",
    ),
    "inspect": (
        "quantizer.cli.inspect:inspect",
        "List the layers of a model and what can be quantized.",
    ),
    "plan": ("quantizer.cli.plan:plan", "Show what a config does to a model, without data."),
    "report": ("quantizer.cli.report:report", "Write the page about a result folder again."),
    "analyze": (
        "quantizer.cli.analyze:analyze",
        "Find how few bits each layer tolerates, for a given size.",
    ),
    "retune": (
        "quantizer.cli.retune:retune",
        "Find scales anew from what calibration has kept.",
    ),
    "diff": (
        "quantizer.cli.diff:diff",
        "Show what differs between two configs or two result folders.",
    ),
    "merge": (
        "quantizer.cli.merge:merge",
        "Make one calibration of result folders calibrated apart.",
    ),
    "schema": (
        "quantizer.cli.schema:schema",
        "Print the JSON Schema of the config, for editors.",
    ),
}
"""Each subcommand: where it is, and its help, so that `--help` imports none of them."""

MODES = "quantizer.cli.run:run"
COMPLETING = "_QUANTIZER_COMPLETE"
"""The variable that shells set which ask for completions."""

EPILOG = """\b
Exit codes: 0 done, 1 check failed (a config has errors, a --gate is not met),
2 wrong usage or unusable config, 3 model, 4 data, 5 results,
6 out of memory, 40 a lost rank, 70 internal error, 130 interrupted,
143 terminated.

Each option can be set by a variable: QUANTIZER_SEED=1, or for a command
QUANTIZER_PLAN_MODEL=my_model.py."""


class LazyCommands(GroupedCommand, click.Group):
    """A group that imports a subcommand when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return _load(entry[0]) if entry else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            near = closest(args[0], [*COMMANDS, *QUANT_MODES])
            words = f"--quant_mode {near} ..." if near in QUANT_MODES else near
            ctx.fail(
                f"No such command '{args[0]}'."
                + (f" Did you mean 'quantizer {words}'?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(
            "quantizer", f"--quant_mode {'|'.join(QUANT_MODES)} --model MODEL [OPTIONS]"
        )
        formatter.write_usage("quantizer", "COMMAND [ARGS]...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name.ljust(NAMES_WIDTH), text) for name, (_, text) in COMMANDS.items()]
            )
        super().format_options(ctx, formatter)


@click.group(
    cls=LazyCommands,
    invoke_without_command=True,
    context_settings={**SETTINGS, "auto_envvar_prefix": "QUANTIZER"},
    epilog=EPILOG,
)
@takes(*RUN, config_file="The JSON config.  [default: built in, for the DPU]")
@click.version_option(__version__, prog_name="quantizer", allow_from_autoenv=False)
@click.option(
    "--color",
    cls=GroupedOption,
    group="Output",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colored output.",
)
@click.pass_context
def cli(ctx: click.Context, /, options: Options, color: str) -> int | None:
    """Post-training quantization of PyTorch models, driven by one JSON file.

    \b
    quantizer init -o net.json
    quantizer plan --config_file net.json --model my_model.py
    quantizer --quant_mode calib --config_file net.json --model my_model.py
    quantizer --quant_mode test --config_file net.json --model my_model.py

    my_model.py is a file of yours with two functions: model() returns a torch.nn.Module,
    calibration_data() an iterable of batches.
    """
    ctx.color = {"always": True, "never": False}.get(
        color, False if os.environ.get("NO_COLOR") else None
    )
    if ctx.invoked_subcommand is not None:
        if was_typed(ctx, "quant_mode"):
            raise click.UsageError("--quant_mode does not go with a subcommand.")
        return None
    if options.quant_mode is None:
        if any(was_typed(ctx, word_of(name)) for name in RUN):
            raise click.UsageError("Missing option '--quant_mode': float, calib or test.")
        click.echo(ctx.get_help(), err=True)
        return UsageError.exit_code
    code: int | None = _load(MODES)(options)
    return code


def main() -> NoReturn:
    """The console script."""
    output = streams.install()
    interrupts.handled()
    # numpy is optional here; without it torch would greet every user with a warning.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    code = run_command(sys.argv[1:])
    sys.stdout.flush()
    if output.lost is not None:
        reason = output.lost.strerror or output.lost
        _show(
            f"standard output cannot be written: {reason}",
            "what was to be printed is lost; results in files are whole",
        )
        code = code or ResultError.exit_code
    # Exchanges with a lost rank are pending, and would keep the interpreter waiting
    if code and torchrun.is_used():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code; every error is printed on standard
    error.
    """
    with torchrun.one_voice(arguments), imported_once():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        code = _call(arguments)
    except click.ClickException as error:
        _show_usage(error)
        return error.exit_code
    except click.Abort as error:
        terminated = isinstance(error.__context__, interrupts.Terminated)
        click.echo("terminated" if terminated else "interrupted", err=True)
        return 143 if terminated else 130
    except ConfigError as error:
        print_diagnostics(error.diagnostics, error.sources)
        return error.exit_code
    except QuantizerError as error:
        _show(error.message, error.help)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in TORCH:
            return _internal_error(error, arguments)
        _show(
            f"this command needs {error.name}, which this Python does not have",
            pip_line("torch"),
        )
        return UsageError.exit_code
    except Exception as error:  # noqa: BLE001 - the last boundary: whatever it is, the user gets a sentence
        text = lost_worker(error)
        if text is None:
            return _internal_error(error, arguments)
        _show(text, WORKER_HELP)
        return DataError.exit_code
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and COMPLETING in os.environ:
            raise  # so click ends when a shell has asked for completions
        # A property or a hook of the user's that runs where nobody expects code of the user's.
        ended = raised("the model", error, ModelError)
        _show(ended.message, ended.help)
        return ended.exit_code
    return code if isinstance(code, int) else 0


def _call(arguments: list[str]) -> Any:
    """What the command returns.

    Raises:
        OutOfMemoryError: it found no more memory, whatever was made of that on the way.
    """
    try:
        return cli.main(arguments, prog_name="quantizer", standalone_mode=False)
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not lacks_memory(error):
            raise
        most = process_memory.peak()
        has = f"; this process had {process_memory.in_words(most)}" if most else ""
        help_ = (
            "use a smaller --batch_size or --memory; `quantizer plan` with the same options "
            "says what a run takes"
        )
        raise OutOfMemoryError(f"there is no more memory{has}", help=help_) from error


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    with interrupts.at_once(), process_memory.importing(module):
        return getattr(importlib.import_module(module), name)


def _show_usage(error: click.ClickException) -> None:
    """Print what click says of a wrong command line, in which texts of the line are quoted."""
    text = io.StringIO()
    error.show(text)
    click.echo(printable.lines(text.getvalue()), err=True, nl=False)


def _show(message: str, help_text: str | None) -> None:
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)
    if help_text:
        click.echo(f"help: {help_text}", err=True)


def _internal_error(error: Exception, arguments: list[str]) -> int:
    """Tell the error in a sentence; its traceback goes to run.log beside the results, or with
    --debug to the screen.
    """
    details = printable.lines("".join(traceback.format_exception(error)))
    where = "run it again with --debug to see the traceback"
    if "--debug" in arguments:
        click.echo(details, err=True)
        where = "the traceback is above"
    elif folder := _output_dir(arguments):
        try:
            _append(folder / "run.log", details)
            where = f"the traceback is in {folder / 'run.log'}"
        except OSError:
            pass
    _show(
        one_line(f"internal error: {type(error).__name__}: {error}"),
        f"this is a bug of quantizer; {where}",
    )
    return QuantizerError.exit_code


def _append(path: Path, text: str) -> None:
    """Add to a file of a result folder, without writing through a link to it."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link")
    replace_file(path, (path.read_bytes() if path.exists() else b"") + text.encode())


def _output_dir(arguments: list[str]) -> Path | None:
    """The result folder of a run, if it is there already: an internal error makes no
    folders.
    """
    context = cli.make_context("quantizer", list(arguments), resilient_parsing=True)
    places = [context.params.get(name) for name in ("report_dir", "output_dir")]
    folder = Path(next(filter(None, places), "quantize_result"))
    return folder if context.params.get("quant_mode") and folder.is_dir() else None
