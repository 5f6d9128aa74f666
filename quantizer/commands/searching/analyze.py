"""`quantizer analyze`: measures the loss of each weight at each bit width, and writes a config
with the best widths.
"""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import click

from quantizer.cli import session
from quantizer.cli.arguments.grouped_command import refuse_typed
from quantizer.cli.arguments.places import from_start, write_output
from quantizer.cli.modes.float_mode import require_directions
from quantizer.cli.run_folder import missing_data
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import table_view
from quantizer.cli.terminal.render import say_note
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.commands.searching import sensitivity
from quantizer.commands.searching.commands import BUDGETS, AnalyzeOptions
from quantizer.commands.searching.float_layers import cheapest_floats, measured_tensors
from quantizer.commands.searching.trials import Subject, watched_data
from quantizer.config.json_types import JsonMapping
from quantizer.config.model import CAST_ONLY
from quantizer.errors import UsageError
from quantizer.evaluation import analyze as engine
from quantizer.evaluation.ablation import Ablation
from quantizer.evaluation.analyze import Analysis, WidthChoice, width_bits
from quantizer.evaluation.width_choice import LARGEST_SIZE, Budget, sized_config
from quantizer.export.gates import parse_gate
from quantizer.graph.ir import Graph
from quantizer.graph.names import path_names
from quantizer.graph.passes import decided_on_data, run_passes
from quantizer.layerwise.sensitivity import Width
from quantizer.option_words import TEST_OPTIONS
from quantizer.printable import json_text
from quantizer.report.content import write_report
from quantizer.results.calibrated import check_model, check_plan
from quantizer.results.folder import ANALYSIS_FILE, QuantInfo, open_written, read_info
from quantizer.results.result_set import locked_as_opened
from quantizer.storage.files import write_json
from quantizer.torch_state import seed_everything

_FLOATS = tuple(sorted(CAST_ONLY - {"float32"}))
"""The float formats that --choices may name."""


def show_losses(options: AnalyzeOptions) -> None:
    """Print what each weight loses at each bit width, and write the config asked for."""
    widths = parse_choices(options.choices)
    budget = parse_budget(options)
    changes_config = bool(options.metric or budget)
    _require_consistent(options, budget)
    reported = read_info(from_start(options.report)) if options.report else None
    with notes_on_stderr(options.json), redirect_stdout(sys.stderr):
        if options.metric:
            require_directions([parse_gate(options.metric, "--metric")], options)
        subject = _subject(options, reported)
        if options.metric:
            result = _search_floats(subject, options.metric)
        else:
            result = _analyze_widths(options, subject, widths, budget)
    if result.tensors is not None:
        result.content["tensors"] = sensitivity.ablation_json(result.tensors)
    text = f"{json_text(result.content)}\n"
    if result.config is not None:
        text = subject.read.text_of(result.config)
    if subject.batches.stamp:
        result.content["stamp"] = subject.batches.stamp
    file = options.config_file if options.apply else options.file
    if file:
        encoding = subject.read.encoding
        write_output(file, text, encoding=encoding, in_place=options.apply)
        if budget is not None:
            result.lines.append(f"config: {file}")
    if reported is not None:
        with locked_as_opened(reported.files):
            path = reported.folder / ANALYSIS_FILE
            write_json(path, reported.with_checksum(result.content))
            write_report(open_written(reported.folder))
    if options.json:
        click.echo(json_text(result.content))
        return
    prints_config = changes_config and file is None
    _print(result, options, stderr=prints_config)
    if prints_config:
        click.echo(text, nl=False)


def _require_consistent(options: AnalyzeOptions, budget: Budget | None) -> None:
    """Raise `UsageError` if options exclude each other, or one needs another."""
    changes_config = bool(options.metric or budget)
    if options.config_file is None and (changes_config or options.tensors):
        raise UsageError(
            "Missing option '--config_file'", help="give the config to measure or change"
        )
    if options.metric and budget:
        raise UsageError(
            "--metric and a budget of size exclude each other", help="give one of them"
        )
    if options.apply and (not changes_config or options.output):
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
        refuse_typed(TEST_OPTIONS, "they are for the test runs of --metric")


@dataclass(frozen=True)
class AnalysisResult:
    """The result of a command.

    Attributes:
        graph: the graph that was analysed.
        content: the figures, as --json prints them.
        config: the changed config; None if nothing is changed.
        analysis: the loss of each weight at each width, if it was measured.
        choice: the chosen widths, if there is a budget.
        lines: the lines below the tables.
        tensors: the effects of all tensors, if they were measured.
    """

    graph: Graph
    content: dict[str, Any]
    config: JsonMapping | None = None
    analysis: Analysis | None = None
    choice: WidthChoice | None = None
    lines: list[str] = field(default_factory=list)
    tensors: Ablation | None = None


def _print(result: AnalysisResult, options: AnalyzeOptions, *, stderr: bool) -> None:
    """Print the tables, and the lines below them."""
    view = table_view(options, result.graph)
    console = output.console(stderr=stderr, exact=view.is_exact)
    lines: list[str] = []
    if result.tensors is not None:
        output.print_table(sensitivity.ablation_table(result.tensors, view), console)
        lines.append(sensitivity.ablation_line(result.tensors))
    if result.analysis is not None:
        table = sensitivity.analysis_table(result.analysis, result.choice, view)
        output.print_table(table, console)
        for name, why in result.analysis.fixed_widths.items():
            lines.append(view.text(f"not analysed: {name}: {why}"))
    if "stamp" in result.content:
        lines.append(f"note: these figures are of {result.content['stamp']}")
    for line in (*lines, *result.lines):
        output.print_line(line, console)


def parse_choices(text: str) -> tuple[Width, ...]:
    """Return the widths of `--choices`, the smallest first.

    Raises:
        UsageError: a word is not a width.
    """
    widths: set[Width] = set()
    for part in text.split(","):
        word = part.strip()
        if word in _FLOATS:
            widths.add(word)
        elif word.isdecimal() and 2 <= int(word) <= 16:
            widths.add(int(word))
        elif word:
            raise UsageError(
                f"--choices {text!r}: {word!r} is not a width",
                help=f"give 2 to 16 bits, {', '.join(_FLOATS)}",
            )
    if not widths:
        raise UsageError(f"--choices {text!r} has no width", help="write for example 2,3,4,8")
    return tuple(sorted(widths, key=lambda width: (width_bits(width), str(width))))


def parse_budget(options: AnalyzeOptions) -> Budget | None:
    """Return the budget of `--budget`, `--size` or `--max_mb`; None if there is none.

    Raises:
        UsageError: there are several, or a value is not a size.
    """
    names = [name for name in BUDGETS if getattr(options, name) is not None]
    if len(names) > 1:
        raise UsageError(
            f"--{' and --'.join(names)} exclude each other", help="give one of them"
        )
    if not names:
        return None
    name = names[0]
    text = str(getattr(options, name)).strip()
    is_percent = name == "size"
    try:
        number = float(text.removesuffix("%")) if is_percent else float(text)
    except ValueError:
        raise UsageError(
            f"--size {text!r} is not a share", help="write for example 60%"
        ) from None
    if not 0 < number < LARGEST_SIZE or is_percent != text.endswith("%"):
        raise UsageError(
            f"--{name} {text} is not a size",
            help="write for example --budget 4.5, --size 60% or --max_mb 20",
        )
    if name == "budget":
        return Budget(bits=number)
    if name == "size":
        return Budget(share=number / 100)
    return Budget(max_bytes=int(number * 1e6))


def _subject(options: AnalyzeOptions, reported: QuantInfo | None) -> Subject:
    """Open config, model and data.

    If results are added to the report of a calibration, check that model and plan are the same
    there.
    """
    seed_everything(options.seed)
    read = session.read_config_file(options.config_file)
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    if batches.stands_in:
        raise missing_data(options)
    if reported is None:
        original = session.trace_model(options, loaded, batches)
    else:
        original = session.recall_graph(options, loaded, batches, reported)
        check_model(reported, original)
        if not read.config.algorithms:
            kept = reported.solution.kept
            graph = run_passes(original, read.config.settings, kept=kept)
            plan = session.resolved_plan(read, original, quiet=True, graph=graph)
            check_plan(reported, read.config, plan)
    return Subject(options, read, loaded, batches, original)


def _search_floats(subject: Subject, metric: str) -> AnalysisResult:
    """Find the layers to leave in float."""
    session.resolved_plan(subject.read, subject.original, quiet=subject.options.json)
    search, tensors = cheapest_floats(subject, metric)
    lines = search.summary_lines(path_names(subject.original))
    return AnalysisResult(
        subject.original, search.to_json(), search.config, lines=lines, tensors=tensors
    )


def _analyze_widths(
    options: AnalyzeOptions, subject: Subject, widths: tuple[Width, ...], budget: Budget | None
) -> AnalysisResult:
    """Measure all widths, and with a budget choose the best."""
    read = subject.read
    # The graph must be the one that calibration would quantize
    kept = decided_on_data(subject.original, read.config.settings, subject.on_device)
    graph = run_passes(subject.original, read.config.settings, kept=kept)
    plan = session.resolved_plan(read, subject.original, quiet=options.json, graph=graph)
    tensors: Ablation | None = None
    if options.tensors:
        tensors = measured_tensors(subject, subject.calibrated(read.config)[0])
    if read.config.algorithms:
        names = ", ".join(algorithm.name for algorithm in read.config.algorithms)
        say_note(f"note: errors are those of round-to-nearest, without {names}")
    data = watched_data(options, subject.batches, plan.graph)
    analysis = engine.analyze_weights(plan, widths, data, options.passes)
    if budget is None:
        content = sensitivity.analysis_json(analysis)
        return AnalysisResult(plan.graph, content, analysis=analysis, tensors=tensors)
    sized = sized_config(
        read.config.document,
        plan,
        subject.original,
        analysis=analysis,
        budget=budget,
        batches=data.batches,
    )
    chosen = sized.choices[sized.best].widths
    content = sensitivity.analysis_json(analysis, chosen)
    content["written"] = sized.best
    content["config"] = sized.document
    lines = []
    for label, choice in sized.choices.items():
        content[label] = sensitivity.choice_json(analysis, choice.widths, choice.noise)
        name = label
        if label == "uniform":
            name += f" {analysis.widths[choice.widths[0]]}"
        lines.append(sized.line(label, name))
    if sized.best == "uniform":
        lines.append("note: the uniform width measures better, so the config has that one")
        lines.append("note: --passes every or other --choices may find better widths")
    return AnalysisResult(
        plan.graph,
        content,
        sized.document,
        analysis=analysis,
        choice=chosen,
        lines=lines,
        tensors=tensors,
    )
