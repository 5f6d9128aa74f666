"""`quantizer analyze`: what each weight's width costs, and the config with the best widths
under a budget.
"""

import json
import math
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from quantizer.calibration import absorption
from quantizer.calibration.events import Stage
from quantizer.cli import session
from quantizer.cli.analyze_tensors import Subject, cheapest_floats, measured_tensors
from quantizer.cli.follow import progress
from quantizer.cli.options import LOOK, TABLE, Options, command, option, takes, write_text
from quantizer.cli.places import Place
from quantizer.cli.render import say
from quantizer.cli.table_view import table_view
from quantizer.cli.typed import refuse_typed
from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document
from quantizer.config.forms.weight_widths import patched
from quantizer.config.load import check_document
from quantizer.config.model import CAST_ONLY, QuantizationSpec, Role
from quantizer.errors import UsageError
from quantizer.evaluation import analyze as engine
from quantizer.evaluation.ablation import Ablation
from quantizer.evaluation.analyze import Analysis, Budget, Width, width_bits
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import path_names
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve
from quantizer.printable import json_text, one_line
from quantizer.report import sensitivity
from quantizer.report.files import READ, write_report
from quantizer.report.view import Listing, View
from quantizer.results.folder import ANALYSIS, QuantInfo, open_written, read_info
from quantizer.results.result_set import locked_as_opened
from quantizer.results.same_calibration import check_model, check_plan
from quantizer.seeding import seed_everything
from quantizer.sources.data import Batches
from quantizer.storage.files import write_json

Choice = tuple[int, ...]
Changes = Mapping[str, Mapping[Role, QuantizationSpec]]

MANY = 200
"""Up to so many weights, the noise of each is measured unless --passes says otherwise."""
_FLOATS = tuple(sorted(CAST_ONLY - {"float32"}))


@dataclass(frozen=True)
class AnalyzeOptions(Options):
    """Those of commands about a model, and its own."""

    budget: float | None = option(
        "Mean bits per weight, without scales, e.g. 4.5.", type=float, metavar="BITS"
    )
    size: str | None = option(
        "Size of all weights in percent of the config's, e.g. 60%.", metavar="SHARE"
    )
    max_mb: float | None = option(
        "Size of all weights with their scales, in 10^6 bytes.", type=float, metavar="MB"
    )
    choices: str = option(
        "Bits to choose from, also float16, bfloat16.", default="2,3,4,8", metavar="LIST"
    )
    passes: str | None = option(
        "Measure the output's noise at the smallest width, measure it at every width, or "
        f"predict it from gradients.  [default: network; over {MANY} weights fast]",
        type=click.Choice(engine.PASSES),
    )
    tensors: bool = option(
        "Also measure each quantized tensor: alone, and all others without it.", default=False
    )
    metric: str | None = option(
        "Leave the fewest bytes in float for which this holds in test runs, e.g. "
        "'top1_drop<=0.005'.",
        metavar="TEST",
    )
    apply: bool = option("Write the changed config into --config_file.", default=False)
    report: str | None = option(
        "Add what is found to the report of this result folder.", type=Place(), metavar="DIR"
    )


BUDGETS = ("budget", "size", "max_mb")


@command()
@takes(
    *("metric", *BUDGETS, "choices", "passes", "tensors", "apply", "report"),
    *(*TABLE, *LOOK, "eval_data", "evaluate", "subset_len", "seed", "device", "memory"),
    kind=AnalyzeOptions,
)
def analyze(options: AnalyzeOptions) -> None:
    """Measure how much each weight loses at each bit width; with a budget, choose widths and
    write a config with them.

    If one width for all weights turns out to be better, the config has that one. Without -o
    FILE the config is printed, and the table goes to standard error. With --metric layers stay
    in float instead, as few as test runs allow.

    \b
    quantizer analyze --config_file net.json --model my_model.py
    quantizer analyze --budget 4 --config net.json --model my_model.py -o mix.json
    quantizer analyze --metric 'sqnr_db>=20' --config net.json --model my_model.py
    """
    widths, budget = parse_choices(options.choices), parse_budget(options)
    changes = options.metric or budget
    if options.config_file is None and (changes or options.tensors):
        raise UsageError(
            "Missing option '--config_file'",
            help="it says what is measured, and what would be changed",
        )
    if options.metric and budget:
        raise UsageError("--metric and a budget of size are two searches: give one of them")
    if options.apply and (not changes or options.output):
        raise UsageError(
            "--apply writes a changed config",
            help="give --metric or a budget of size, and no -o",
        )
    if options.metric:
        refuse_typed(
            ["choices", "passes", "tensors"],
            "--metric measures each tensor, and chooses no widths",
        )
    else:
        refuse_typed(["eval_data", "evaluate"], "they are for the test runs of --metric")
    reported = read_info(Path(options.report)) if options.report else None
    with session.notes_on_stderr(options.json), redirect_stdout(sys.stderr):
        subject = _subject(options, reported)
        search = _floats(subject, options.metric) if options.metric else None
        result = search or _run(options, subject, widths, budget)
    file = options.config_file if options.apply else options.file
    if file:
        write_text(file, result.text)
    if reported is not None:
        _add_to_report(reported, result.content)
    if options.json:
        click.echo(json_text(result.content))
        return
    on_stdout = not changes or file is not None
    console, view = (
        session.console(stderr=not on_stdout),
        table_view(options, result.graph, stderr=not on_stdout),
    )
    for table in result.tables(view):
        console.print(table)
    for line in (*result.notes(view), *result.lines):
        # A path is one line however long, and no markup
        console.print(Text(one_line(line)), soft_wrap=True)
    if not on_stdout:
        click.echo(result.text, nl=False)


@dataclass(frozen=True)
class Findings:
    """What was found on a graph, and with a budget the widths picked; `text` is the file that
    is written, `content` what --json prints, `lines` what people see below the table.
    """

    graph: Graph
    content: dict[str, Any]
    text: str
    found: Analysis | None = None
    picked: Choice | None = None
    lines: tuple[str, ...] = ()
    tensors: Ablation | None = None

    def tables(self, view: View) -> list[Listing]:
        """What people see first."""
        widths = (
            [] if self.found is None else [sensitivity.table(self.found, self.picked, view)]
        )
        return [
            *([] if self.tensors is None else [sensitivity.ablation_table(self.tensors, view)]),
            *widths,
        ]

    def notes(self, view: View) -> list[str]:
        """What is said of the tables."""
        said = [] if self.tensors is None else [sensitivity.ablation_line(self.tensors)]
        return (
            said if self.found is None else [*said, *sensitivity.kept_lines(self.found, view)]
        )


def parse_choices(text: str) -> tuple[Width, ...]:
    """The widths of `--choices`, the smallest first.

    Raises:
        UsageError: one is none.
    """
    found: list[Width] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in _FLOATS and not (word.isdecimal() and 2 <= int(word) <= 16):
            raise UsageError(
                f"--choices {text!r}: {word!r} is no width",
                help=f"2 to 16 bits, {', '.join(_FLOATS)}",
            )
        found.append(word if word in _FLOATS else int(word))
    if not found:
        raise UsageError(f"--choices {text!r} has no width", help="write for example 2,3,4,8")
    return tuple(
        sorted(dict.fromkeys(found), key=lambda width: (width_bits(width), str(width)))
    )


def parse_budget(options: AnalyzeOptions) -> Budget | None:
    """The budget of `--budget`, `--size` or `--max_mb`; None if there is none.

    Raises:
        UsageError: several, or a value that is no size.
    """
    given = {name: value for name in BUDGETS if (value := getattr(options, name)) is not None}
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} are budgets: give one of them")
    if not given:
        return None
    (name, value), *_ = given.items()
    try:
        number = (
            float(value.strip().removesuffix("%")) / 100 if name == "size" else float(value)
        )
    except ValueError:
        raise UsageError(
            f"--size {value!r} is no share", help="write for example 60%"
        ) from None
    if not 0 < number < math.inf or (name == "size" and not value.strip().endswith("%")):
        raise UsageError(
            f"--{name} {value} is no size",
            help="write for example --budget 4.5, --size 60% or --max_mb 20",
        )
    sizes = {
        "budget": Budget(bits=number),
        "size": Budget(share=number),
        "max_mb": Budget(max_bytes=int(number * 1e6)),
    }
    return sizes[name]


def _subject(options: AnalyzeOptions, reported: QuantInfo | None) -> Subject:
    """What is analyzed; the calibration whose report takes up what is found is of the same
    model.
    """
    seed_everything(options.seed)
    read = session.read_config(options.config_file)
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    if batches.stands_in:
        raise session.missing_data()
    if reported is None:
        original = session.trace_model(options, loaded, batches)
    else:
        original = session.recall_graph(options, loaded, batches, reported)
        check_model(reported, original)
        if not read.config.algorithms:
            refused = absorption.refused(reported.solution.absorption)
            graph = run_passes(original, read.config.settings, refused=refused)
            check_plan(
                reported,
                read.config,
                session.make_plan(read, original, quiet=True, graph=graph),
            )
    return Subject(options, read, loaded, batches, original)


def _floats(subject: Subject, metric: str) -> Findings:
    """The search for the fewest bytes in float."""
    session.make_plan(subject.read, subject.original, quiet=subject.options.json)
    found, gate, tensors = cheapest_floats(subject, metric)
    content = found.to_json(gate) | {"tensors": sensitivity.ablation_json(tensors)}
    lines = found.lines(gate, path_names(subject.original))
    return Findings(subject.original, content, found.text, lines=tuple(lines), tensors=tensors)


def _add_to_report(reported: QuantInfo, content: dict[str, Any]) -> None:
    """Keep what was found in the folder of a calibration, and write its report again.

    Raises:
        ResultError: another calibration has taken its place.
    """
    folder = reported.folder
    with locked_as_opened(reported.files):
        write_json(folder / ANALYSIS, reported.sealed(content))
        write_report(open_written(folder, READ))


def _run(
    options: AnalyzeOptions, subject: Subject, widths: tuple[Width, ...], budget: Budget | None
) -> Findings:
    read, original, batches = subject.read, subject.original, subject.batches
    record = absorption.decide(
        original, read.config.settings, session.on_device(options, batches)
    )
    graph = run_passes(original, read.config.settings, refused=absorption.refused(record))
    plan = session.make_plan(read, original, quiet=options.json, graph=graph)
    tensors = measured_tensors(subject)[0] if options.tensors else None
    beside = {"tensors": sensitivity.ablation_json(tensors)} if tensors else {}
    if read.config.algorithms:
        names = ", ".join(algorithm.name for algorithm in read.config.algorithms)
        say(f"note: errors are those of round-to-nearest, without {names}", err=True)
    found = _measure(options, plan, widths, batches)
    if budget is None:
        content = sensitivity.analysis_json(found) | beside
        return Findings(plan.graph, content, json_text(content) + "\n", found, tensors=tensors)
    both = {"mixed": engine.chosen(found, budget), "uniform": engine.uniform(found, budget)}
    choices = {label: picked for label, picked in both.items() if picked is not None}
    noise = {
        label: engine.measured(plan, found, picked, lambda: session.on_device(options, batches))
        for label, picked in choices.items()
    }
    best = min(noise, key=noise.__getitem__)  # of equally good ones the first
    changes = engine.specs_of(plan, found, choices[best])
    changed = patched(read.config.document, changes)
    _check(plan, original, changes, changed)
    content = (
        sensitivity.analysis_json(found, choices[best])
        | {"written": best, "config": changed}
        | beside
    )
    lines = []
    for label, picked in choices.items():
        content[label] = sensitivity.choice_json(found, picked, noise[label])
        name = label if label == "mixed" else f"uniform {found.widths[picked[0]]}"
        lines.append(sensitivity.choice_line(name, found, picked, noise[label]))
    if best == "uniform":
        lines.append(
            "note: as measured, the uniform width is better, so the config has that one"
        )
        lines.append("note: --passes every or other --choices may find better widths")
    if file := options.config_file if options.apply else options.file:
        lines.append(f"config: {file}")
    text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
    return Findings(plan.graph, content, text, found, choices[best], tuple(lines), tensors)


def _measure(
    options: AnalyzeOptions, plan: Plan, widths: tuple[Width, ...], batches: Batches
) -> Analysis:
    count = len(engine.candidates(plan)[0])
    passes = options.passes or ("network" if count <= MANY else "fast")
    total, unit = engine.units_of_work(passes, count, batches.total)
    with Stage(progress(quiet=options.json), "analyze", total, unit) as stage:
        return engine.analyze(
            plan, widths, lambda: session.on_device(options, batches), passes, stage.advance
        )


def _check(plan: Plan, original: Graph, changes: Changes, changed: dict[str, Any]) -> None:
    """Refuse a config that does not do exactly what was chosen.

    Raises:
        ConfigError: it is not valid, as where a device has no such width.
        UsageError: the config's form cannot say it.
    """
    checked = check_document(Document.of(changed, "the config with the chosen widths"))
    config = checked.require()
    after = resolve(config, plan.graph, original)
    if any(finding.severity == "error" for finding in after.diagnostics):
        raise ConfigError(after.diagnostics, checked.sources)
    if wrong := engine.differing(plan, after, changes):
        raise UsageError(
            f"the config cannot be changed in place: {wrong[0]} would not be as chosen",
            help="state the weights' dtype, scheme and axis in one place, global or overall",
        )
