"""Searches for a config with which gates hold, for `quantizer run --gate` and `quantizer tune`.
Writes the config, its calibration and test, tune.json and the table. Both commands also share
fields of options here.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.modes.calib_mode import run_calib
from quantizer.cli.modes.test_mode import run_test
from quantizer.cli.run_folder import data_options
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import Outcome
from quantizer.commands.searching.divided_data import DividedData
from quantizer.commands.searching.search import KEPT, NOT_TRIED, Row, Search
from quantizer.commands.searching.steps import STEPS
from quantizer.commands.searching.trials import Figures, SearchContext, Subject, Trial, plan_of
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.errors import UsageError
from quantizer.export.agreement import Verification
from quantizer.export.gates import Gate, failed_gates, gate_lines, not_met_gates
from quantizer.graph.modules import Untraced
from quantizer.plan.model import Plan
from quantizer.report.tables import finite_row, number_text
from quantizer.report.verdict import VerdictFacts
from quantizer.report.view import Listing
from quantizer.results.folder import TUNE_FILE, read_info
from quantizer.results.result_set import locked_as_opened, mark_result_folder
from quantizer.sources.first_batch import remarks_on_data
from quantizer.storage.files import write_json
from quantizer.storage.replacing import cannot_use, replace_file
from quantizer.torch_state import seed_everything

TUNED_CONFIG = "tuned_config.json"
"""The name of the written config if the search started from a file of the user."""
_CHANGES_KEY = "// quantizer tune"
_OPTION_KEY = "// calibrate with"
_AFTER = ("$schema", "//")
"""The keys that stay before the comments."""
_MAX_REASON = 150
"""Characters of a reason; tune.json has all of it."""


@dataclass(frozen=True)
class TunedRun:
    """A search for a config, and the calibration and the test of its best trial.

    Attributes:
        search: the trials, and the best of them.
        gates: that have to hold.
        sentence: on the data that judge; empty if there is nothing to say.
        minutes: the time budget.
        config: the path of the written config.
        opened: the model and its data.
        calibrated: the result of calib mode.
        tested: the result of test mode.
        test_options: the options of the test.
    """

    search: Search
    gates: Sequence[Gate]
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
        gates = [gate.text for gate in self.gates]
        return {
            **search_json(self.search, gates),
            "minutes": self.minutes,
            "data": self.sentence,
            "config": self.config,
        }

    def show(self) -> None:
        """Print the table of the steps, and which changes were kept."""
        console = output.console()
        metrics = [gate.metric for gate in self.gates]
        output.print_table(search_table(self.search, metrics), console)
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
        search,
        gates,
        data.sentence,
        minutes,
        str(path),
        opened,
        calibrated,
        outcome,
        test_options,
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
    text = read.text_of(document)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(read.encoding))
    except OSError as error:
        raise cannot_use(path.parent, error) from None


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


def search_table(search: Search, metrics: Sequence[str]) -> Listing:
    """Return a table with a row for each step that was measured.

    Args:
        search: with all its rows.
        metrics: those of the gates.
    """
    columns = list(dict.fromkeys((*metrics, "sqnr_db")))
    lines = []
    for row in search.rows:
        if row.figures is None:
            continue
        texts = []
        for metric in columns:
            value = row.figures.gated.get(metric)
            texts.append(number_text(value, ".5g"))
        megabytes = f"{row.figures.weight_bytes / 1e6:.3f}"
        cost = (megabytes, str(row.tests), f"{row.seconds:.1f}")
        lines.append((row.step, *texts, *cost, row.result))
    titles = ("step", *columns, "MB", "tests", "s", "result")
    layouts = (titles, ("step", *columns, "MB", "s", "result"), ("step", *columns, "result"))
    return Listing(titles, lines, frozenset(titles[1:-1]), layouts)


def result_lines(search: Search, data: str, config: str) -> Iterator[str]:
    """Yield lines about what was changed, what was not tried and why, and the time.

    Args:
        search: with all its rows.
        data: a sentence on the data; empty if there is nothing to say.
        config: the path of the written config.
    """
    if search.figures.is_met and not search.changes:
        yield "all gates hold with the config as it is"
    for gate in search.figures.missed_by_float:
        yield f"{NOT_TRIED}: any change: the float network does not meet {gate} either"
    for change in search.changes:
        yield f"{KEPT}: {change}"
    for reason, steps in _not_tried(search.rows).items():
        yield f"{NOT_TRIED}: {', '.join(steps)}: {reason}"
    if data:
        yield f"data: {data}"
    yield f"config: {config}"
    mode = search.best.fast_finetune
    if mode is not None:
        yield f"calibrate with --fast_finetune {mode}, too: it is an option"


def _not_tried(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the steps that were not tried, by their reason."""
    steps_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.result != NOT_TRIED:
            continue
        reason = "; ".join(row.reasons)
        if len(reason) > _MAX_REASON:
            reason = f"{reason[:_MAX_REASON]}…"
        steps_by_reason.setdefault(reason, []).append(row.step)
    return steps_by_reason


def search_json(search: Search, gates: Sequence[str]) -> JsonObject:
    """Return a search for programs."""
    return {
        "gates": list(gates),
        "met": search.figures.is_met,
        "missed_by_float": list(search.figures.missed_by_float),
        "out_of_time": search.is_out_of_time,
        "changes": search.changes,
        "fast_finetune": search.best.fast_finetune,
        "steps": [_row_json(row) for row in search.rows],
    }


def _row_json(row: Row) -> JsonObject:
    content: JsonObject = {
        "step": row.step,
        "cost": row.cost,
        "result": row.result,
        "change": row.change,
        "reasons": list(row.reasons),
        "tests": row.tests,
        "seconds": round(row.seconds, 2),
    }
    if row.figures is not None:
        shortfall = math.fsum(row.figures.shortfalls)
        figures = {"weight_bytes": row.figures.weight_bytes, "shortfall": shortfall}
        content |= finite_row(figures)
        content["metrics"] = finite_row(row.figures.gated)
    return content


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
        options = self.test_options
        assert self.calibrated.plan is not None
        path, size = "", 0
        verified: Verification | None = None
        for written, verification in tested.deployed.items():
            verified, path = verification, str(written)
            size = tested.exports[-1]["bytes"]
        of_data = options
        if self.data is not None:
            # As the page joins the options of both modes
            of_data = replace(options, subset_len=self.data.calib_options.subset_len)
        not_met = not_met_gates(gates, tested.metrics, is_complete=not tested.error)
        return VerdictFacts.of(
            self.calibrated.plan,
            verified,
            untraced=self.untraced,
            remarks=remarks_on_data(self.opened.batches),
            path=path or None,
            size=size,
            tested=tested.report,
            config=options.config_file or "",
            model_option=options.model or "",
            data_options=data_options(of_data),
            gates=gate_lines(gates, tested.metrics),
            not_met=failed_gates(gates, tested.metrics),
            is_failed=bool(tested.error or not_met),
            improvement=self.opened.improvement,
        )
