"""`quantizer plan`: what a config does to a model, before any calibration."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from quantizer.calibration import memory_prediction
from quantizer.cli import session
from quantizer.cli.options import LOOK, TABLE, Options, command, takes
from quantizer.cli.table_view import filtered_view
from quantizer.cli.traced_model import TracedModel, traced_model
from quantizer.config.model import Algorithm, Config
from quantizer.errors import UsageError
from quantizer.export import Refusal, planned_refusals, require_extras
from quantizer.graph.output_parts import output_parts
from quantizer.plan.model import Plan
from quantizer.plan.remarks import left_parameters, share_left
from quantizer.plan.size import peak_activation_bytes, weight_bytes
from quantizer.printable import json_text
from quantizer.report import tables
from quantizer.report.view import View
from quantizer.storage import process_memory
from quantizer.storage.files import write_json

_MB = 1e6


@command()
@takes(
    *TABLE,
    "filter",
    "for_",
    "fast_finetune",
    "dpu_accuracy",
    "memory",
    *LOOK,
    for_="Tell what --deploy TARGET cannot hold; may be repeated.",
)
def plan(options: Options) -> None:
    """Show how many layers each rule matches, each tensor's spec, the size before and after,
    and the memory calibration takes.

    Only the first batches are read, for their shapes. Algorithms do not run; names in their
    settings are checked.

    \b
    quantizer plan --config_file net.json --model my_model.py
    """
    require_extras(options.for_)
    with session.notes_on_stderr(options.json):
        read, finetuned = session.config_as_asked(
            options.config_file, options.dpu_accuracy, options.fast_finetune
        )
        traced = traced_model(options, tested=True)
    original = traced.graph
    found = session.make_plan(read, original)
    session.named_structures(read, found.graph)
    view = filtered_view(options, found.graph, original)
    before, after = weight_bytes(found)
    size = traced.size
    activations = peak_activation_bytes(found.graph, size)
    data = memory_prediction.Data(size, traced.batches or 1, options.memory)
    peaks = peaks_of(found, read.config, data, traced, finetuned=bool(finetuned))
    outputs = output_parts(original)
    content = found.to_json() | {
        "outputs": tables.named_outputs(outputs),
        "algorithms": [algorithm.name for algorithm in read.config.algorithms],
        "weight_bytes": {"float": before, "quantized": after},
        "float_parameters": left_parameters(found)[0],
        "peak_activation_bytes": {"batch_size": size, "bytes": activations},
        "peak_memory_bytes": peaks,
        "data": traced.filled,
    }
    refused = {target: planned_refusals(target, found) for target in options.for_}
    if refused:
        content["refused"] = {
            target: [asdict(each) for each in rows] for target, rows in refused.items()
        }
    if options.file:
        write_json(Path(options.file), content)
    if options.json:
        click.echo(json_text(content))
    else:
        _show(found, view, content, read.config.algorithms)
        for line in tables.output_lines(outputs):
            click.echo(line)
        _show_refused(refused, found.graph.model, view)
    failed = {target: rows for target, rows in refused.items() if rows}
    if failed:
        texts = [
            f"--deploy {target} cannot hold {len(rows)} of these tensors"
            for target, rows in failed.items()
        ]
        helps = dict.fromkeys(each.help for rows in failed.values() for each in rows)
        raise UsageError("; ".join(texts), help="; ".join(helps))


def peaks_of(
    found: Plan,
    config: Config,
    data: memory_prediction.Data,
    traced: TracedModel,
    *,
    finetuned: bool,
) -> dict[str, int | None]:
    """The peak of memory of each mode, which loads and traces the model as it was here."""
    specs = {key: tensor.spec for key, tensor in found.tensors.items()}
    tested = data.size if traced.tested is None else traced.tested
    more = {
        "calib": memory_prediction.calibration_bytes(found, config, data, finetuned=finetuned),
        "test": memory_prediction.comparison_bytes(found.graph, specs, tested),
    }
    return {mode: memory_prediction.peak_with(each, traced.base) for mode, each in more.items()}


def _show_refused(refused: dict[str, list[Refusal]], model: str, view: View) -> None:
    """Say for each target which tensors it cannot hold, layer by layer; `model` stands for what
    is about all.
    """
    for target, rows in refused.items():
        click.echo(
            f"\n--deploy {target} can hold {'all but these:' if rows else 'all of them'}"
        )
        if rows:
            named = [(each.layer or model, each.role, each.why) for each in rows]
            session.console().print(tables.refusal_table(named, view))


def _show(
    found: Plan, view: View, content: dict[str, Any], algorithms: Sequence[Algorithm]
) -> None:
    """Print the tables, and the sizes below them."""
    console = session.console()
    console.print(tables.rule_table(found))
    console.print()
    console.print(tables.plan_table(found, view))
    console.print()
    before, after = content["weight_bytes"].values()
    click.echo(
        f"{len(found.tensors)} tensors quantized; weights {before / _MB:.2f} MB -> "
        f"{after / _MB:.2f} MB"
    )
    click.echo(share_left(content["float_parameters"]))
    if algorithms:
        inserts = any(algorithm.stage == "rescale" for algorithm in algorithms)
        hidden = "; layers that it inserts are not in the table" if inserts else ""
        click.echo(
            "calibration runs "
            f"{', then '.join(algorithm.name for algorithm in algorithms)}{hidden}"
        )
    size, activations = content["peak_activation_bytes"].values()
    click.echo(
        f"calibration keeps up to {activations / _MB:.1f} MB of activations at batch size "
        f"{size}"
    )
    peaks = {
        mode: process_memory.in_words(peak)
        for mode, peak in content["peak_memory_bytes"].items()
        if peak is not None
    }
    if peaks:
        click.echo(
            f"peak memory: {', '.join(f'{mode} {peak}' for mode, peak in peaks.items())}"
        )
