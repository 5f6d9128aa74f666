"""`quantizer tune`: changes a config from cheap to dear until gates hold, and calibrates and
tests what came out. `quantizer run --gate` does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.modes.calib_mode import run_calib
from quantizer.cli.modes.float_mode import require_directions
from quantizer.cli.modes.run_mode import judged, require_met
from quantizer.cli.modes.test_mode import run_test
from quantizer.cli.run_folder import missing_data
from quantizer.cli.terminal import output, process
from quantizer.cli.terminal.follow import one_display
from quantizer.cli.terminal.output import Outcome
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.commands.searching.commands import TuneOptions
from quantizer.commands.searching.divided_data import DividedData, divide_data
from quantizer.commands.searching.search import Search, result_lines, search_json, search_table
from quantizer.commands.searching.steps import STEPS
from quantizer.commands.searching.trials import Figures, SearchContext, Subject, Trial, plan_of
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.load import load_config
from quantizer.config.run_config import write_config
from quantizer.errors import UsageError
from quantizer.export.agreement import Verification
from quantizer.export.gates import (
    Gate,
    failed_gates,
    gate_lines,
    not_met_gates,
    parse_gate,
    require_known_names,
    require_known_parts,
)
from quantizer.export.refusals import require_extras
from quantizer.graph.modules import Untraced
from quantizer.plan.model import Plan
from quantizer.printable import json_text
from quantizer.report.verdict import VerdictFacts
from quantizer.results.folder import TUNE_FILE, read_info
from quantizer.results.result_set import (
    locked,
    locked_as_opened,
    mark_result_folder,
    require_result_folder,
)
from quantizer.results.write import check_owner
from quantizer.sources.first_batch import remarks_on_data
from quantizer.storage.files import write_json
from quantizer.storage.replacing import require_writable
from quantizer.torch_state import seed_everything

TUNED_CONFIG = "tuned_config.json"
"""The name of the written config if the search started from a file of the user."""
_CHANGES_KEY = "// quantizer tune"
_OPTION_KEY = "// calibrate with"
_AFTER = ("$schema", "//")
"""The keys that stay before the comments."""


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


@dataclass(frozen=True)
class TunedRun:
    """A search for a config, and the calibration and the test of its best trial.

    Attributes:
        search: the trials, and the best of them.
        sentence: on the data that judge; empty if there is nothing to say.
        minutes: the time budget.
        config: the path of the written config.
        opened: the model and its data.
        calibrated: the result of calib mode.
        tested: the result of test mode.
        test_options: the options of the test.
    """

    search: Search
    sentence: str
    minutes: float
    config: str
    opened: session.OpenedRun
    calibrated: Outcome
    tested: Outcome
    test_options: Options

    @property
    def content(self) -> dict[str, object]:
        """Return the content of tune.json."""
        return {
            **search_json(self.search),
            "minutes": self.minutes,
            "data": self.sentence,
            "config": self.config,
        }

    def show(self) -> None:
        """Print the table of the steps, and which changes were kept."""
        console = output.console()
        output.print_table(search_table(self.search), console)
        for line in result_lines(self.search, self.sentence, self.config):
            output.print_line(line, console)
        sys.stdout.flush()


def tune_config(
    opened: session.OpenedRun,
    data: DividedData,
    gates: Sequence[Gate],
    path: Path,
    *,
    minutes: float,
    targets: Sequence[str],
    deploy: Sequence[str] = (),
    tested: tuple[Mapping[str, float], Plan] | None = None,
    gives_advice: bool = False,
) -> TunedRun:
    """Change the config of a run until the gates hold. Write the best config, and calibrate and
    test it as `--quant_mode` does.

    Args:
        opened: the model and its data.
        data: that calibrate and test.
        gates: that have to hold.
        path: where the config is written.
        minutes: the time after which no trial is measured.
        targets: that have to be able to hold each config.
        deploy: the targets that the test exports to. Trials imitate their runtimes.
        tested: the metrics of the config as it is, and its plan; None to measure it.
        gives_advice: whether the test says what to do if a gate does not hold.

    Raises:
        UsageError: a target cannot hold the config, or there is no metric of a gate.
        QuantizerError: the config cannot be measured, or a mode failed.
    """
    options = data.calib_options
    read = session.read_config_file(options.config_file)
    subject = Subject(options, read, opened.loaded, data.calibration, opened.graph)
    context = SearchContext(subject, data.evaluation, gates, targets=targets, run_as=deploy)
    search = _searched(context, minutes, tested)
    if gives_advice and not search.figures.is_met:
        opened = opened.changed(improvement=_advice(search))
    folder = from_start(options.output_dir)
    mark_result_folder(folder)
    _write_config(path, read, search)
    data = data.with_config(str(path))
    calib_options = data.calibrating(fast_finetune=search.best.fast_finetune)
    test_options = data.testing(for_=(), deploy=tuple(deploy))
    opened = opened.with_batches(data.calibration)
    seed_everything(options.seed)
    calibrated = run_calib(calib_options, opened=opened)
    seed_everything(options.seed)
    outcome = run_test(test_options, opened=opened)
    run = TunedRun(
        search, data.sentence, minutes, str(path), opened, calibrated, outcome, test_options
    )
    info = read_info(folder)
    with locked_as_opened(info.files):
        write_json(folder / TUNE_FILE, info.with_checksum(run.content))
    return run


def _searched(
    context: SearchContext, minutes: float, tested: tuple[Mapping[str, float], Plan] | None
) -> Search:
    """Search for a config with which the gates hold."""
    subject = context.subject
    start = Trial(subject.read.config.document, subject.options.fast_finetune)
    refusal = context.refusal(plan_of(start, subject.original), start.config.algorithms)
    if refusal:
        raise UsageError(refusal, help="start from a config that this target can hold")
    figures: Figures | None = None
    if tested is not None:
        figures = context.figures(*tested)
    search = Search(context, STEPS, 60 * minutes)
    with context.shown_as("tune"):
        search.run(start, figures)
    return search


def _advice(search: Search) -> str:
    """Return what to do next, after a search with which a gate does not hold."""
    if search.figures.missed_by_float:
        gates = ", ".join(search.figures.missed_by_float)
        return f"relax the bound of {gates}: the float network does not meet it either."
    if search.is_out_of_time:
        return "give more --minutes: the time was up before all changes were tried."
    return (
        "no change of the config meets the gate, and tune.json has what was tried: relax the "
        "bound, or choose another preset."
    )


def _write_config(path: Path, read: session.ReadConfig, search: Search) -> None:
    """Write the config of the best trial, with comments that say what was changed.

    Raises:
        ResultError: it cannot be written.
    """
    best = search.best
    document = with_tuning_comments(best.document, search.changes, best.fast_finetune)
    write_config(path, read.text_of(document), read.encoding)


def with_tuning_comments(
    document: JsonMapping, changes: Sequence[str], fast_finetune: str | None
) -> JsonObject:
    """Return the document with the changes as a comment, and with the option that calibration
    needs besides the config, if any.

    Changes of an earlier search stay in the list.
    """
    earlier = document.get(_CHANGES_KEY) or []
    comments: JsonObject = {}
    if earlier or changes:
        comments[_CHANGES_KEY] = [*earlier, *changes]
    if fast_finetune is not None:
        comments[_OPTION_KEY] = f"--fast_finetune {fast_finetune}"
    rest = {key: document[key] for key in document if key not in (_CHANGES_KEY, _OPTION_KEY)}
    before = takewhile(lambda key: key in _AFTER, rest)
    return {**{key: rest[key] for key in before}, **comments, **rest}


def loses_most(options: Options) -> str:
    """Return the remedy for gates that do not hold, which names the report of the run."""
    folder = from_start(options.output_dir)
    page = folder / "report.html"
    if not page.exists():
        page = folder / "layers.csv"
    return f"{page} shows which layers lose most"


@dataclass(frozen=True)
class FinishedRun:
    """A run after its last step.

    Attributes:
        destination: what its user calls the target.
        test_options: the options of its test.
        opened: the model and its data.
        calibrated, tested: the results of both modes.
        gates: those of the user, and the limit of the file.
        data: that calibrate and judge; None on modules, whose weights need no data.
        tuning: the search for a better config, if there was one.
        remedy: what to do if a gate does not hold; empty to name the page of the report.
        untraced: what the file holds besides the layers of the plan.
    """

    destination: str
    test_options: Options
    opened: session.OpenedRun
    calibrated: Outcome
    tested: Outcome
    gates: Sequence[Gate]
    data: DividedData | None = None
    tuning: TunedRun | None = None
    remedy: str = ""
    untraced: Untraced = field(default_factory=Untraced)

    def facts(self) -> VerdictFacts:
        """Return what the verdict is about."""
        tested, gates = self.tested, self.gates
        assert self.calibrated.plan is not None
        path, size = "", 0
        verified: Verification | None = None
        for written, verification in tested.deployed.items():
            verified, path = verification, str(written)
            size = tested.exports[-1]["bytes"]
        not_met = not_met_gates(gates, tested.metrics, is_complete=not tested.error)
        return VerdictFacts.of(
            self.calibrated.plan,
            verified,
            untraced=self.untraced,
            remarks=remarks_on_data(self.opened.batches),
            path=path or None,
            size=size,
            tested={**tested.report, "improvement": self.opened.improvement},
            config=self.test_options.config_file or "",
            is_in_shell=True,
            gates=gate_lines(gates, tested.metrics),
            not_met=failed_gates(gates, tested.metrics),
            is_failed=bool(tested.error or not_met),
        )
