"""`quantizer plan`: what a config does to a model, before any calibration."""

from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.options import LOOK, TABLE, Options, command, takes
from quantizer.cli.table_view import filtered_view
from quantizer.engine.result_files import write_json
from quantizer.plan.size import peak_activation_bytes, weight_bytes
from quantizer.report import tables
from quantizer.sources.data import DEFAULT_BATCH_SIZE

_MB = 1e6


@command()
@takes(*TABLE, "filter", *LOOK)
def plan(options: Options) -> None:
    """Show how many layers each rule matches, each tensor's spec, the size before and after, and the memory calibration
    takes.

    Only the first batch is read, for its shape. Algorithms do not run; names in their settings are checked.

    \b
    quantizer plan --config_file net.json --model my_model.py
    """
    with session.notes_on_stderr(options.json):
        read = session.read_config(options.config_file)
        loaded = session.open_model(options)
        batches = session.open_data(options, loaded)
        original = session.trace_model(options, loaded, batches)
    found = session.make_plan(read, original)
    session.named_structures(read, found.graph)
    view = filtered_view(options, found.graph, original)
    algorithms = [algorithm.name for algorithm in read.config.algorithms]
    before, after = weight_bytes(found)
    size = options.batch_size or batches.first_size or DEFAULT_BATCH_SIZE
    memory = peak_activation_bytes(found.graph, size)
    content = found.to_json() | {
        "algorithms": algorithms,
        "weight_bytes": {"float": before, "quantized": after},
        "peak_activation_bytes": {"batch_size": size, "bytes": memory},
    }
    if options.file:
        write_json(Path(options.file), content)
    if options.json:
        click.echo(session.as_json(content))
        return
    console = session.console()
    console.print(tables.rule_table(found))
    console.print()
    console.print(tables.plan_table(found, view))
    console.print()
    click.echo(f"{len(found.tensors)} tensors quantized; weights {before / _MB:.2f} MB -> {after / _MB:.2f} MB")
    if algorithms:
        inserts = any(algorithm.stage == "rescale" for algorithm in read.config.algorithms)
        hidden = "; layers that it inserts are not in the table" if inserts else ""
        click.echo(f"calibration runs {', then '.join(algorithms)}{hidden}")
    click.echo(f"calibration keeps up to {memory / _MB:.1f} MB of activations at batch size {size}")
