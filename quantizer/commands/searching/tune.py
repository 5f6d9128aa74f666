"""`quantizer tune`: changes a config from cheap to dear until gates hold, and calibrates and
tests what came out.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace

import click

from quantizer.cli import session
from quantizer.cli.arguments.places import from_start
from quantizer.cli.modes.float_mode import require_directions
from quantizer.cli.modes.run_mode import judged, require_met
from quantizer.cli.run_folder import missing_data
from quantizer.cli.terminal import output, process
from quantizer.cli.terminal.follow import one_display
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.commands.searching.commands import TuneOptions
from quantizer.commands.searching.divided_data import divide_data
from quantizer.commands.searching.tuned_run import (
    TUNED_CONFIG,
    TunedRun,
    loses_most,
    tune_config,
)
from quantizer.config.load import load_config
from quantizer.errors import UsageError
from quantizer.export.gates import Gate, parse_gate, require_known_names, require_known_parts
from quantizer.export.refusals import require_extras
from quantizer.printable import json_text
from quantizer.results.result_set import locked, require_result_folder
from quantizer.results.write import check_owner
from quantizer.storage.replacing import require_writable
from quantizer.torch_state import seed_everything


def show_tuned(options: TuneOptions) -> None:
    """Write the config that was found and its results, and print what each change gained."""
    gates = [parse_gate(text) for text in options.gate]
    _require_usable(options, gates)
    stdout = sys.stderr if options.json else sys.stdout
    with notes_on_stderr(quiet=True), redirect_stdout(stdout), one_display():
        run = _tune(options, gates)
    if options.json:
        click.echo(json_text({"tune": run.content, "test": run.tested.content}))
    else:
        run.show()
        output.print_verdict([judged(gates, run.tested)])
    require_met(run.test_options, gates, run.tested, remedy=loses_most(options))
    if run.tested.error:
        raise run.tested.error


def _require_usable(options: TuneOptions, gates: Sequence[Gate]) -> None:
    """Raise `UsageError` if options are missing, or exclude each other."""
    if process.is_rank():
        raise UsageError(
            "`quantizer tune` works in one process", help="run it without torchrun"
        )
    if not gates:
        raise UsageError(
            "Missing option '--gate'", help="give what has to hold, such as 'top1_drop<=0.005'"
        )
    if options.config_file is None:
        raise UsageError(
            "Missing option '--config_file'",
            help="give the config to change, or use `quantizer run MODEL --gate TEST`",
        )
    require_extras(options.for_, to_plan=True)
    load_config(options.config_file).require()


def _tune(options: TuneOptions, gates: Sequence[Gate]) -> TunedRun:
    """Change the config step by step, and calibrate and test the best config."""
    folder = from_start(options.output_dir)
    require_result_folder(folder)
    seed_everything(options.seed)
    require_directions(gates, options)
    opened = session.open_run(options)
    if opened.batches.stands_in:
        raise missing_data(options)
    if session.evaluator_of(options, opened.loaded) is None:
        require_known_names(gates, options.deploy)
    require_known_parts(gates, opened.graph)
    with locked(folder):
        check_owner(folder, opened.graph.model, overwrite=options.overwrite)
    path = folder / TUNED_CONFIG
    require_writable(path)
    data = divide_data(replace(options, deploy=()), opened)
    targets = opened.options.for_
    return tune_config(opened, data, gates, path, minutes=options.minutes, targets=targets)
