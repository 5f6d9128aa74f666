"""`quantizer inspect`: lists the layers of a model, with their names in a config."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.modes.float_mode import config_to_look
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import filtered_view
from quantizer.cli.terminal.render import say
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.cli.traced_model import named_structures, traced_model
from quantizer.config.wording import counted
from quantizer.errors import GateError, UsageError
from quantizer.export.gates import failed_gates, gate_lines, parse_gate, require_known
from quantizer.graph.emit import emit
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import module_of, path_names
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.definitions import InputGroup, Structure
from quantizer.graph.structure.find import find_structure
from quantizer.numerics.integer import HARDSWISH_POSITION, LEAKY_SLOPE, SIXTH
from quantizer.plan.dpu_limits import DPU_NAME
from quantizer.plan.dpu_support import Verdict, subgraphs, verdicts
from quantizer.plan.remarks import plan_remarks
from quantizer.printable import json_text
from quantizer.report import tables
from quantizer.report.rows import judgement
from quantizer.report.tables import shape_text
from quantizer.report.view import Listing, TableRow, TableView
from quantizer.storage.files import write_text

_COUNTS = ("dpu_operators", "cpu_operators", "dpu_subgraphs")
"""The metrics of gates."""
_NUMBERS = frozenset({"channels"})
_TITLES = ("layers that read one value", "channels", "factors are folded into")


def show_layers(
    options: Options, gate: tuple[str, ...], *, to_dpu: bool, algorithms: bool
) -> None:
    """Print the layers of a model, or its structure, or what the DPU can run."""
    gates = [parse_gate(text) for text in gate]
    read = config_to_look(options.config_file)
    settings = read.config.settings
    for_dpu = to_dpu
    if options.config_file is not None and settings.target_device == "DPU":
        for_dpu = True
    if algorithms:
        _require_structure_alone(options, for_dpu=for_dpu)
    if gates and not for_dpu:
        raise UsageError(
            "--gate needs the DPU: its metrics count what the DPU can run",
            help="add --to DPU, or a config for the DPU",
        )
    require_known(gates, _COUNTS)
    if for_dpu:
        read = _for_dpu(read)
        settings = read.config.settings
    with notes_on_stderr(options.json):
        original = traced_model(options).graph
    if algorithms:
        _show_structure(options, read, run_passes(original, settings, device=False))
        return
    plan = session.resolved_plan(read, original, quiet=True)
    view = filtered_view(options, plan.graph, original)
    content: dict[str, Any] = plan.to_json() | {"float": dict(plan.floats)}
    metrics: dict[str, int] = {}
    verdict_of: dict[str, Verdict] = {}
    if for_dpu:
        verdict_of = verdicts(plan)
        metrics = _counts(plan.graph, verdict_of)
        support = {name: verdict.to_json() for name, verdict in verdict_of.items()}
        content |= {**metrics, "support": support}
    if options.json:
        click.echo(json_text(content))
    elif for_dpu:
        reference = run_passes(original, settings, device=False)
        _show_support(plan.graph, verdict_of, reference, view)
    elif not options.quiet:
        table = tables.layer_table(plan.graph, plan.tensors, plan.floats, view)
        output.console(exact=view.is_exact).print(table)
        for line in plan_remarks(plan):
            say(line)
    if options.file:
        write_text(from_start(options.file), emit(plan.graph))
    not_met = failed_gates(gates, metrics)
    if gates and not options.json:
        lines = gate_lines(gates, metrics)
        output.print_verdict([judgement(lines, is_failed=bool(not_met))])
    if not_met:
        raise GateError(
            f"not met: {', '.join(not_met)}",
            help="the table of layers says why one cannot run on the DPU",
        )


def _for_dpu(read: session.ReadConfig) -> session.ReadConfig:
    """Return a config with the DPU as its device."""
    settings = dataclasses.replace(read.config.settings, target_device="DPU")
    config = dataclasses.replace(read.config, settings=settings)
    return dataclasses.replace(read, config=config)


def _require_structure_alone(options: Options, *, for_dpu: bool) -> None:
    """Raise `UsageError` for options that have no effect with --algorithms."""
    if for_dpu:
        raise UsageError(
            "--algorithms and --to DPU exclude each other",
            help="leave out --to, or the config for the DPU",
        )
    for name in ("names", "top", "filter"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} has no effect with --algorithms, which shows no table of layers",
                help="leave out one of them",
            )


def _show_structure(options: Options, read: session.ReadConfig, graph: Graph) -> None:
    """Print the blocks and groups of the graph; for algorithms of the config that name layers,
    those of each algorithm.

    Raises:
        ConfigError: the model lacks a name, or it does not fit.
    """
    structures = named_structures(read, graph)
    if not structures:
        structures = {"": find_structure(graph)}
    if options.json:
        content = {title: dataclasses.asdict(part) for title, part in structures.items()}
        click.echo(json_text(content.get("", content)))
        return
    if options.quiet:
        return
    for title, structure in structures.items():
        if title:
            say(f"{title}:")
        for part in structure_tables(graph, structure):
            if isinstance(part, Listing):
                output.console().print(part)
            elif part:
                say(str(part))


def _counts(graph: Graph, verdict_of: dict[str, Verdict]) -> dict[str, int]:
    """Return the operators on the DPU and on the CPU, and the subgraphs of the DPU."""
    devices = [verdict.device for verdict in verdict_of.values()]
    counts = (devices.count("DPU"), devices.count("CPU"), subgraphs(graph, verdict_of))
    return dict(zip(_COUNTS, counts, strict=True))


def _show_support(
    graph: Graph, verdict_of: dict[str, Verdict], reference: Graph, view: TableView
) -> None:
    """Print the table, the approximations, the sources of limits, and the counts."""
    console = output.console(exact=view.is_exact)
    output.print_table(_support_table(graph, verdict_of, view), console)
    for node in graph.nodes:
        before = reference.by_name[node.name]
        if (node.target, node.attrs) != (before.target, before.attrs):
            described = _DESCRIPTIONS[node.op](node, before)
            say(view.text(f"approximated: {node.name}: {described}"))
    sources = dict.fromkeys(verdict.source for verdict in verdict_of.values())
    for source in filter(None, sources):
        say(f"limits: {source}")
    on_dpu, on_cpu, pieces = _counts(graph, verdict_of).values()
    click.echo(
        f"{on_dpu} of {on_dpu + on_cpu} operators run on the DPU ({DPU_NAME}), in "
        f"{counted(pieces, 'subgraph')}"
    )


def _support_table(graph: Graph, verdicts: Mapping[str, Verdict], view: TableView) -> Listing:
    """Return a table with a row for each layer: the device that runs it, and why it is not the
    DPU. If there are too many, the layers that the DPU cannot run are shown.
    """
    lines = []
    ranks = []
    rank_of_device = {"CPU": 0.0, "DPU": 1.0}
    for node in graph.nodes:
        verdict = verdicts[node.name]
        reason = verdict.why or verdict.engine
        lines.append((node.name, node.op, shape_text(node), verdict.device, reason))
        ranks.append(rank_of_device.get(verdict.device))
    titles = ("layer", "operator", "output", "device", "engine, or why not")
    return view.listing(titles, lines, ranks, idle="without computation")


def _average(node: Node, before: Node) -> str:
    multiplier = node.attrs["multiplier"]
    shift = node.attrs["shift"]
    height, width = node.attrs["kernel_size"]
    share = multiplier * height * width / 2**shift
    effect = "exact" if share == 1 else f"{share:.6g} of the mean"
    return (
        f"the average of {height}x{width} is its sum * {multiplier} / 2^{shift}, which is "
        f"{effect}"
    )


def _leaky_relu(node: Node, before: Node) -> str:
    multiplier, shift = LEAKY_SLOPE
    slope = before.attrs.get("negative_slope", 0.01)
    return f"its slope is {multiplier} / 2^{shift}, in float it is {slope:.6g}"


def _hardsigmoid(node: Node, before: Node) -> str:
    multiplier, shift = SIXTH
    share = 6 * multiplier / 2**shift
    return f"relu6(x + 3) * {multiplier} / 2^{shift}, which is {share:.6g} of the float slope"


def _hardswish(node: Node, before: Node) -> str:
    largest = 1 - math.ldexp(1, -HARDSWISH_POSITION)
    return (
        f"x times its hardsigmoid in 8 bits at position {HARDSWISH_POSITION}, which is at "
        f"most {largest:.6g}"
    )


_DESCRIPTIONS: dict[str, Callable[[Node, Node], str]] = {
    **dict.fromkeys(("avg_pool2d", "adaptive_avg_pool2d", "mean"), _average),
    "leaky_relu": _leaky_relu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
}


def structure_tables(graph: Graph, structure: Structure) -> Iterator[Listing | str]:
    """Yield tables and lines about the groups of layers that read the same value.

    Blocks with the same groups are shown once, with names relative to the block. Groups outside
    of blocks follow.
    """
    paths_by_rows: dict[tuple[TableRow, ...], list[str]] = {}
    for number, block in enumerate(structure.blocks):
        path = block.path
        rows = _rows(graph, structure, number, path)
        paths_by_rows.setdefault(rows, []).append(path)
    for rows, paths in paths_by_rows.items():
        blocks = paths[0]
        if len(paths) > 1:
            blocks = f"{len(paths)}, {paths[0]} to {paths[-1]}, all alike"
        yield f"blocks: {blocks}"
        yield Listing(_TITLES, rows, _NUMBERS)
    outside = _rows(graph, structure, None, "")
    if outside:
        yield "in no block:" if structure.blocks else "no blocks:"
        yield Listing(_TITLES, outside, _NUMBERS)
    folds: Counter[str] = Counter()
    layers = 0
    for group in structure.groups:
        kind = "none" if group.fold is None else group.fold.kind
        folds[kind] += 1
        layers += len(group.layers)
    yield (
        f"{layers} layers read {len(structure.groups)} values; factors fold into a "
        f"normalization for {folds['norm']}, into the layer before for {folds['layer']}, into "
        f"neither for {folds['none']}"
    )


def _rows(
    graph: Graph, structure: Structure, number: int | None, path: str
) -> tuple[TableRow, ...]:
    """Return the groups of one block, or those outside of blocks."""
    rows = []
    for group in structure.groups:
        if group.block != number:
            continue
        names = ", ".join(dict.fromkeys(_module_paths(graph, group.layers, path)))
        rows.append((names, str(group.channels), _target(graph, group, path)))
    return tuple(rows)


def _target(graph: Graph, group: InputGroup, block: str) -> str:
    """Return the module whose parameters take the factors, or why none can."""
    fold = group.fold
    if fold is None:
        paths = path_names(graph).items()
        names = {name: _relative(path, block) for name, path in paths}
        return f"none: {TableView(names).text(group.why_not)}"
    parts = _module_paths(graph, [fold.node], block)
    if fold.channels is not None:
        count = len(set(fold.channels))
        order = "not in this order or not all"
        if count < len(fold.channels):
            order = "each is read several times"
        parts.append(f"{count} of its channels, {order}")
    if fold.extra:
        others = _module_paths(graph, fold.extra, block)
        parts.append(f"also changes {', '.join(others)}")
    return "; ".join(parts)


def _module_paths(graph: Graph, names: Iterable[str], block: str) -> list[str]:
    """Return the module paths of some layers, relative to a block."""
    return [_relative(module_of(graph, name), block) for name in names]


def _relative(path: str, block: str) -> str:
    return path.removeprefix(f"{block}.") if block else path
