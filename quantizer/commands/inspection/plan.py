"""`quantizer plan`: shows what a config does to a model, before calibration."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from quantizer.calibration import memory_prediction
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import filtered_view
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.cli.traced_model import TracedModel, named_structures, traced_model
from quantizer.config.algorithms import Algorithm
from quantizer.config.json_types import JsonObject
from quantizer.config.model import ResolvedConfig
from quantizer.config.wording import counted
from quantizer.errors import UsageError
from quantizer.export.exporter import Refusal
from quantizer.export.refusals import (
    plan_remarks,
    planned_refusals,
    planned_values,
    require_extras,
)
from quantizer.export.targets import CHECKED_TARGETS
from quantizer.graph.channels.output_parts import Output, output_parts
from quantizer.plan.model import Plan
from quantizer.plan.remarks import left_parameters, share_left
from quantizer.plan.size import peak_activation_bytes, weight_bytes
from quantizer.printable import json_text
from quantizer.report.tables import plan_table, rule_table
from quantizer.report.view import TableView
from quantizer.storage import process_memory
from quantizer.storage.files import write_json

_MB = 1e6


def show_plan(options: Options) -> None:
    """Print the plan of a config and a model, or write it as JSON."""
    require_extras(options.for_, to_plan=True)
    with notes_on_stderr(options.json):
        read, finetuned = session.config_as_asked(
            options.config_file, options.dpu_accuracy, options.fast_finetune
        )
        traced = traced_model(options, tested=True)
    original = traced.graph
    planned = session.resolved_plan(read, original)
    named_structures(read, planned.graph)
    view = filtered_view(options, planned.graph, original)
    before, after = weight_bytes(planned)
    size = traced.size
    activations = peak_activation_bytes(planned.graph, size)
    peaks = peaks_of(planned, read.config, traced, options.memory, finetuned=bool(finetuned))
    outputs = output_parts(original)
    content = planned.to_json() | {
        "outputs": named_outputs(outputs),
        "algorithms": [algorithm.name for algorithm in read.config.algorithms],
        "weight_bytes": {"float": before, "quantized": after},
        "float_parameters": left_parameters(planned)[0],
        "peak_activation_bytes": {"batch_size": size, "bytes": activations},
        "peak_memory_bytes": peaks,
        "data": traced.filled,
    }
    refusals: dict[str, list[Refusal]] = {}
    for target in traced.for_:
        checked = CHECKED_TARGETS[target]
        refusals[target] = planned_refusals(checked, planned, read.config.algorithms)
        rows = [asdict(refusal) for refusal in refusals[target]]
        content.setdefault("refused", {})[target] = rows
        values = planned_values(checked, planned)
        content.setdefault("stored_as_floats", {})[target] = values
    if traced.way:
        content["synthetic_data"] = traced.way
    if options.file:
        write_json(from_start(options.file), content)
    if options.json:
        click.echo(json_text(content))
    else:
        _show(planned, view, content, read.config.algorithms)
        for line in output_lines(outputs):
            click.echo(line)
        if not options.quiet:
            _show_refused(refusals, planned.graph.model, view)
        for target in traced.for_:
            for remark in plan_remarks(CHECKED_TARGETS[target], planned):
                click.echo(remark)
    texts = []
    remedies: dict[str, None] = {}
    for target, refused in refusals.items():
        if refused:
            words = CHECKED_TARGETS[target].words
            texts.append(f"{words} cannot express {counted(len(refused), 'tensor')}")
        for refusal in refused:
            remedies[refusal.help] = None
    if texts:
        raise UsageError("; ".join(texts), help="; ".join(remedies))


def peaks_of(
    plan: Plan,
    config: ResolvedConfig,
    traced: TracedModel,
    memory: int | None,
    *,
    finetuned: bool,
) -> dict[str, int | None]:
    """Return the predicted peak of memory of each mode, in bytes; `memory` is that of
    `--memory`.
    """
    data = memory_prediction.BatchSizes(traced.size, traced.batches or 1, memory)
    tested = data.size if traced.tested is None else traced.tested
    calib = memory_prediction.calibration_bytes(plan, config, data, finetuned=finetuned)
    test = memory_prediction.comparison_bytes(plan.graph, plan.specs, tested, data.batches)
    return {
        "calib": memory_prediction.peak_with(calib, traced.base),
        "test": memory_prediction.peak_with(test, traced.base),
    }


def _show_refused(refused: dict[str, list[Refusal]], model: str, view: TableView) -> None:
    """Print for each target the tensors that it cannot express.

    Args:
        refused: by target.
        model: the name that stands for a refusal of the whole model.
        view: of the table.
    """
    for target, refusals in refused.items():
        words = CHECKED_TARGETS[target].words
        if not refusals:
            click.echo(f"\n{words} can express all tensors")
            continue
        click.echo(f"\n{words} can express all tensors but these:")
        rows = []
        for refusal in refusals:
            rows.append((refusal.layer or model, refusal.role, refusal.why))
        table = view.listing(("layer", "tensor", "reason"), rows, what="tensor")
        output.console(exact=view.is_exact).print(table)


def _show(
    plan: Plan, view: TableView, content: dict[str, Any], algorithms: Sequence[Algorithm]
) -> None:
    """Print the tables, and sizes below them."""
    console = output.console(exact=view.is_exact)
    for table in (rule_table(plan, view), "", plan_table(plan, view), ""):
        output.print_table(table, console)
    before, after = content["weight_bytes"].values()
    click.echo(
        f"{len(plan.tensors)} tensors quantized; weights {before / _MB:.2f} MB -> "
        f"{after / _MB:.2f} MB"
    )
    click.echo(share_left(content["float_parameters"]))
    if "synthetic_data" in content:
        click.echo(f"calibration first makes {content['synthetic_data']}")
    if algorithms:
        names = ", then ".join(algorithm.name for algorithm in algorithms)
        line = f"calibration runs {names}"
        if any(algorithm.stage == "rescale" for algorithm in algorithms):
            line += "; layers that it inserts are not in the table"
        click.echo(line)
    size, activations = content["peak_activation_bytes"].values()
    click.echo(
        f"calibration keeps up to {activations / _MB:.1f} MB of activations at batch size "
        f"{size}"
    )
    peaks = []
    for mode, peak in content["peak_memory_bytes"].items():
        if peak is not None:
            peaks.append(f"{mode} {process_memory.size_text(peak)}")
    if peaks:
        click.echo(f"peak memory: {', '.join(peaks)}")


def named_outputs(outputs: Iterable[Output]) -> list[JsonObject]:
    """Return the names of outputs and of their parts for `inspect --json`. Nothing has run
    yet.
    """
    rows = []
    for whole in outputs:
        parts = []
        if len(whole.parts) > 1:
            for part in whole.parts:
                names = ("name", "index", "layer", "pooled")
                parts.append({name: getattr(part, name) for name in names})
        rows.append({"name": whole.name, "parts": parts})
    return rows


def output_lines(outputs: Iterable[Output]) -> Iterator[str]:
    """Yield a line for each output, with the names that can be used in gates, such as
    `sqnr_db[0.scores]>=30`.
    """
    for whole in outputs:
        texts = []
        for part in whole.parts:
            names = [part.name, part.index] if part.index else [part.name]
            text = " or ".join(dict.fromkeys(names))
            if part.pooled > 1:
                text += f" ({part.pooled} sources together)"
            texts.append(text)
        line = f"output {whole.name}"
        if len(texts) != 1:
            line += f", in {len(texts)} parts: {', '.join(texts)}"
        yield line
