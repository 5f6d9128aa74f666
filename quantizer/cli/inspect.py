"""`quantizer inspect`: the layers of a model, with the names a config may use, and what can be
quantized.
"""

import dataclasses
from pathlib import Path
from typing import Any

import click

from quantizer.cli import session
from quantizer.cli.gates import met, parse_gate, require_known
from quantizer.cli.options import LOOK, TABLE, Options, command, takes
from quantizer.cli.render import say
from quantizer.cli.table_view import config_to_look, filtered_view
from quantizer.cli.traced_model import traced_model
from quantizer.errors import GateError, UsageError
from quantizer.graph.emit import emit
from quantizer.graph.find_structure import find_structure
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.plan.dpu_limits import NAME
from quantizer.plan.dpu_support import Verdict, subgraphs, verdicts
from quantizer.plan.model import Plan
from quantizer.plan.remarks import remarks
from quantizer.printable import json_text
from quantizer.report import dpu_tables, tables
from quantizer.report.structure import structure_tables
from quantizer.report.view import Listing, View
from quantizer.storage.files import write_text

COUNTS = ("dpu_operators", "cpu_operators", "dpu_subgraphs")
"""What gates may ask for."""


@command()
@takes(*TABLE, "filter", *LOOK)
@click.option(
    "--target",
    type=click.Choice(["DPU"]),
    help="List which layers this device can run, and why not.",
)
@click.option(
    "--algorithms",
    is_flag=True,
    help="List blocks, layers that share an input, and where factors fold.",
)
@click.option(
    "--gate",
    multiple=True,
    metavar="TEST",
    help="Exit with 1 unless TEST holds, e.g. 'cpu_operators<=2'.",
)
def inspect(
    options: Options, target: str | None, algorithms: bool, gate: tuple[str, ...]
) -> None:
    """List each layer's name, operator and output shape, what is quantized, and why the rest is
    not.

    Without a config it lists the network as it is, and all that can be quantized. With --target
    DPU, or a config for the DPU, it lists what the device can run instead; with --algorithms,
    the blocks and groups of layers that algorithms find, by the names that scaling_layers and
    inside_layer_modules take. With -o FILE.py it also writes the network as readable code, as
    calibration does.

    \b
    quantizer inspect --model my_model.py
    quantizer inspect --filter 'layer1.*' --model my_model.py
    quantizer inspect --target DPU --model my_model.py
    quantizer inspect --algorithms --model my_model.py
    """
    gates = [parse_gate(text) for text in gate]
    read = config_to_look(options.config_file)
    settings = read.config.settings
    for_dpu = target is not None or (
        options.config_file is not None and settings.target_device == "DPU"
    )
    if algorithms:
        _require_structure_alone(options, for_dpu=for_dpu)
    if gates and not for_dpu:
        raise UsageError(
            "--gate asks what the DPU can run", help="add --target DPU, or a config for the DPU"
        )
    require_known(gates, COUNTS)
    if for_dpu:
        settings = dataclasses.replace(settings, target_device="DPU")
        read = dataclasses.replace(
            read, config=dataclasses.replace(read.config, settings=settings)
        )
    with session.notes_on_stderr(options.json):
        original = traced_model(options).graph
    if algorithms:
        _show_structure(options, read, run_passes(original, settings, device=False))
        return
    plan = session.make_plan(read, original, quiet=True)
    view = filtered_view(options, plan.graph, original)
    content: dict[str, Any] = plan.to_json() | {"float": dict(plan.floats)}
    metrics: dict[str, float] = {}
    if for_dpu:
        found = verdicts(plan)
        metrics = _counts(plan.graph, found)
        content |= metrics | {
            "support": {name: verdict.to_json() for name, verdict in found.items()}
        }
    if options.json:
        click.echo(json_text(content))
    elif for_dpu:
        _show_support(plan, found, run_passes(original, settings, device=False), metrics, view)
    else:
        session.console().print(tables.layer_table(plan.graph, plan.tensors, plan.floats, view))
        for line in remarks(plan):
            say(line)
    if options.file:
        write_text(Path(options.file), emit(plan.graph))
    if not options.json:
        for line in met(gates, metrics):
            click.echo(line)
    if failed := [each.text for each in gates if not each.holds(metrics)]:
        raise GateError(
            f"not met: {', '.join(failed)}",
            help="the table above says why a layer cannot run on the DPU",
        )


def _require_structure_alone(options: Options, *, for_dpu: bool) -> None:
    """Raise `UsageError` for what does not go with --algorithms."""
    if for_dpu:
        raise UsageError(
            "--algorithms and the DPU do not go together",
            help="leave out --target, or the DPU's config",
        )
    for name in ("names", "top", "filter"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} is for tables of layers", help="leave it out, or --algorithms"
            )


def _show_structure(options: Options, read: session.ReadConfig, graph: Graph) -> None:
    """What the graph shows; with a config that names parts of it, what each of its algorithms
    finds.

    Raises:
        ConfigError: a name that the model does not have, or that does not fit.
    """
    named = session.named_structures(read, graph)
    if options.json:
        found = {title: dataclasses.asdict(each) for title, each in named.items()}
        click.echo(json_text(found or dataclasses.asdict(find_structure(graph))))
        return
    for title, each in (named or {"": find_structure(graph)}).items():
        for part in filter(
            None, (f"{title}:" if title else "", *structure_tables(graph, each))
        ):
            session.console().print(part) if isinstance(part, Listing) else say(str(part))


def _counts(graph: Graph, found: dict[str, Verdict]) -> dict[str, float]:
    """How many operators run on the DPU, how many do not, and in how many pieces."""
    devices = [verdict.device for verdict in found.values()]
    return dict(
        zip(
            COUNTS,
            (devices.count("DPU"), devices.count("CPU"), subgraphs(graph, found)),
            strict=True,
        )
    )


def _show_support(
    plan: Plan,
    found: dict[str, Verdict],
    reference: Graph,
    metrics: dict[str, float],
    view: View,
) -> None:
    """The table, what is approximated, the documents, and the sums."""
    session.console().print(dpu_tables.support_table(plan.graph, found, view))
    for line in dpu_tables.approximations(plan.graph, reference):
        say(view.text(line))
    for source in dict.fromkeys(verdict.source for verdict in found.values() if verdict.source):
        say(f"limits: {source}")
    on, off, pieces = metrics.values()
    click.echo(
        f"{on} of {on + off} operators run on the DPU ({NAME}), in {pieces} "
        f"subgraph{'' if pieces == 1 else 's'}"
    )
