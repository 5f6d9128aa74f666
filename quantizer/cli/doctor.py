"""`quantizer doctor`: machine, config, data and model in one pass, before anything takes
long.
"""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

from quantizer.calibration import memory_prediction
from quantizer.cli import session
from quantizer.cli.options import LOOK, Options, command, takes
from quantizer.cli.plan import peaks_of
from quantizer.cli.traced_model import traced_from
from quantizer.config.load import LoadResult, default_config, load_config
from quantizer.config.model import Config
from quantizer.errors import GateError, QuantizerError
from quantizer.evaluation import checkup
from quantizer.evaluation.checkup import Check, Level
from quantizer.printable import json_text, one_line

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


@command()
@takes(
    *(name for name in LOOK if name != "output"),
    "subset_len",
    "seed",
    "device",
    "output_dir",
    "memory",
)
def doctor(options: Options) -> None:
    """Check machine, config, data and model in one pass: what would be slow, wrong or left in
    float, with the remedy.

    Without --model the machine and the config alone are looked at. The exit code is 1 if there
    is an error.

    \b
    quantizer doctor --config_file net.json --model my_model.py
    """
    with session.notes_on_stderr(True), redirect_stdout(sys.stderr):
        found = list(_checks(options))
    if options.json:
        click.echo(json_text([asdict(check) for check in found]))
    else:
        console = session.console()
        for check in found:
            line = Text.assemble(
                (f"{check.level:8}", STYLES[check.level]),
                one_line(f"{check.part}: {check.text}"),
            )
            console.print(line, soft_wrap=True)
            if check.help:
                console.print(Text(one_line(f"        help: {check.help}")), soft_wrap=True)
    if errors := sum(check.level == "error" for check in found):
        raise GateError(
            f"{errors} error{'' if errors == 1 else 's'} found",
            help="each has its remedy above",
        )


def _checks(options: Options) -> Iterator[Check]:
    """All findings; what cannot be read is one, and what needs it is left out."""
    yield from checkup.environment(options.device, Path(options.output_dir))
    result = load_config(options.config_file) if options.config_file else None
    yield from _config(result)
    if options.model is None:
        return
    try:
        yield from _model(options, default_config() if result is None else result.config)
    except QuantizerError as error:
        yield Check("model", "error", error.message, error.help or "")


def _config(result: LoadResult | None) -> Iterator[Check]:
    if result is None:
        yield Check(
            "config",
            "note",
            "no --config_file: the built-in default for the DPU would hold",
            "quantizer init",
        )
        return
    for found in result.diagnostics:
        if found.severity != "note":
            where = f"{found.place}: " if found.place else ""
            level: Level = "error" if found.severity == "error" else "warning"
            yield Check(
                "config", level, f"{where}{found.code}: {found.message}", found.help or ""
            )
    if result.config is not None:
        yield Check("config", "ok", f"{result.config.source} is valid")


def _model(options: Options, config: Config | None) -> Iterator[Check]:
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    yield from checkup.data(batches)
    if loaded.evaluate is None and loaded.evaluation_data is None and options.eval_data is None:
        text = "test mode would compare both networks on the calibration data"
        yield Check(
            "data", "note", text, "evaluation_data() in the model's file, or --eval_data"
        )
    traced = traced_from(options, loaded, batches, tested=config is not None)
    original = traced.graph
    lengths = f", {len(original.lengths)} open lengths" if original.lengths else ""
    values = sum(each.numel() for each in loaded.module.parameters())
    text = (
        f"{loaded.name} can be traced: {len(original.nodes)} layers{lengths}, "
        f"{values / 1e6:.2f} million parameters"
    )
    yield Check("model", "ok", text)
    if config is None:
        return
    plan = session.make_plan(session.ReadConfig(config, (), {}), original, quiet=True)
    yield from checkup.plan(plan)
    data = memory_prediction.Data(traced.size, traced.batches or 1, options.memory)
    yield from checkup.room(peaks_of(plan, config, data, traced, finetuned=False).items())
    if plan.corrected:
        text = (
            f"biases of {len(plan.corrected)} layers are corrected, which takes a second pass "
            "over the data"
        )
        yield Check("plan", "note", text, "include_bias_corr: false where that takes too long")
