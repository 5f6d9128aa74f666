"""`quantizer doctor`: checks machine, config, data and model before a long run."""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict

import click
from rich.text import Text

from quantizer.calibration import memory_prediction
from quantizer.cli.arguments.options import LOOK, Options, command, takes
from quantizer.cli.arguments.places import from_start
from quantizer.cli.opening import session
from quantizer.cli.opening.traced_model import traced_from
from quantizer.cli.terminal import output
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.commands.inspection import checkup
from quantizer.commands.inspection.checkup import CheckLevel, CheckResult
from quantizer.commands.inspection.plan import peaks_of
from quantizer.config.load import LoadResult, default_config, load_config
from quantizer.config.model import Config
from quantizer.config.wording import counted
from quantizer.errors import GateError, QuantizerError
from quantizer.printable import json_text, one_line

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


@command()
@takes(
    *(name for name in LOOK if name not in ("output", "overwrite")),
    "subset_len",
    "seed",
    "device",
    "output_dir",
    "memory",
)
def doctor(options: Options) -> None:
    """Check machine, config, data and model before a run: what would be slow, wrong or left in
    float, with a remedy for each.

    Without --model only the machine and the config are checked. The exit code is 1 if there is
    an error.

    \b
    quantizer doctor --config_file net.json --model my_model.py
    """
    with notes_on_stderr(True), redirect_stdout(sys.stderr):
        checks = list(_checks(options))
    if options.json:
        click.echo(json_text([asdict(check) for check in checks]))
    else:
        _print(checks)
    errors = sum(check.level == "error" for check in checks)
    if errors:
        raise GateError(
            f"{counted(errors, 'error')} found", help="follow the remedy of each error above"
        )


def _print(checks: list[CheckResult]) -> None:
    console = output.console()
    for check in checks:
        level = (f"{check.level:8}", _STYLES[check.level])
        line = Text.assemble(level, one_line(f"{check.part}: {check.text}"))
        output.print_line(line, console)
        if check.help:
            output.print_line(f"        help: {check.help}", console)


def _checks(options: Options) -> Iterator[CheckResult]:
    """Yield all results. If something cannot be read, the error is one of them."""
    yield from checkup.check_machine(options.device, from_start(options.output_dir))
    result = None
    config: Config | None = default_config()
    if options.config_file:
        result = load_config(options.config_file)
        config = result.config
    yield from _check_config(result)
    if options.model is None:
        return
    try:
        yield from _check_model(options, config)
    except QuantizerError as error:
        yield CheckResult("model", "error", error.message, error.help or "")


def _check_config(result: LoadResult | None) -> Iterator[CheckResult]:
    if result is None:
        text = "there is no --config_file: the built-in default for the DPU is used"
        yield CheckResult("config", "note", text, "`quantizer init` writes a config")
        return
    for finding in result.diagnostics:
        if finding.severity == "note":
            continue
        level: CheckLevel = finding.severity
        text = f"{finding.code}: {finding.message}"
        if finding.place:
            text = f"{finding.place}: {text}"
        yield CheckResult("config", level, text, finding.help or "")
    if result.config is not None:
        yield CheckResult("config", "ok", f"{result.config.source} is valid")


def _check_model(options: Options, config: Config | None) -> Iterator[CheckResult]:
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    yield from checkup.check_data(batches)
    if loaded.evaluate is None and loaded.evaluation_data is None and options.eval_data is None:
        text = "test mode would compare both networks on the calibration data"
        remedy = "add evaluation_data() to the model's file, or give --eval_data"
        yield CheckResult("data", "note", text, remedy)
    traced = traced_from(options, loaded, batches, tested=config is not None)
    original = traced.graph
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    text = f"{loaded.name} can be traced: {len(original.nodes)} layers"
    if original.lengths:
        text += f", {counted(len(original.lengths), 'dynamic length')}"
    text += f", {parameters / 1e6:.2f} million parameters"
    yield CheckResult("model", "ok", text)
    if config is None:
        return
    plan = session.resolved_plan(session.ReadConfig(config, (), {}), original, quiet=True)
    yield from checkup.check_planned_tensors(plan)
    data = memory_prediction.BatchSizes(traced.size, traced.batches or 1, options.memory)
    peaks = peaks_of(plan, config, data, traced, finetuned=False)
    yield from checkup.check_memory(peaks.items())
    if plan.corrected:
        text = f"bias correction of {counted(len(plan.corrected), 'layer')} "
        text += "takes a second pass over the data"
        yield CheckResult(
            "plan", "note", text, "set include_bias_corr: false if that takes too long"
        )
