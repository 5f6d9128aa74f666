"""Passes: functions from a graph to a graph, which run between tracing and planning.

`GRAPH_PASSES` lists them by name, in the order in which they run. A pass keeps the names of the
layers that survive. Unless its row says otherwise, it also keeps the float function up to
rounding. No pass knows a scale.
"""

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from quantizer.config.model import Settings
from quantizer.graph.ir import Graph

Pass = Callable[..., Graph]
"""Takes a graph; the pass `CHECKED` also takes the layers that it must not change."""
CHECKED = "absorb_high_biases"
"""The pass that calibration checks on data, layer by layer."""


@dataclass(frozen=True)
class PassRow:
    """What the table of passes says of one pass.

    Args:
        module: the file in this folder that has it.
        setting: the setting that switches it on, None if it always runs.
        device: the device that needs it, None if all do.
        changes: its effect on the float function. "nothing"; "tails" changes only values that
            batch norms have hardly seen; the config asks for "on purpose". "device" computes as
            the device does. Test mode compares layers with a float
            network without the passes of a device.
        tolerance: the largest difference of outputs, as a share of the largest output, of a
            pass that changes nothing or tails.
        summary: a sentence on its `Graph.changes`, with their count and the largest amount.
    """

    module: str
    setting: str | None = None
    device: str | None = None
    changes: Literal["nothing", "tails", "on purpose", "device"] = "nothing"
    tolerance: float = 1e-5
    summary: str = ""


GRAPH_PASSES: dict[str, PassRow] = {
    "remove_dropout": PassRow("activations"),
    "compute_weights": PassRow("compute_constants"),
    "compute_constants": PassRow("compute_constants"),
    "separate_biases": PassRow("linear_layers"),
    "linear_from_matmul": PassRow("linear_layers"),
    "linear_of_experts": PassRow("linear_layers"),
    "convert_relu6_to_relu": PassRow(
        "activations", "convert_relu6_to_relu", changes="on purpose"
    ),
    "convert_silu_to_hswish": PassRow(
        "activations", "convert_silu_to_hswish", changes="on purpose"
    ),
    "fold_batch_norm": PassRow("fold_batch_norm"),
    "cross_layer_equalization": PassRow(
        "equalization",
        "include_cle",
        summary="pairs of layers equalized: {count}; largest factor 2^{amount:.1f}",
    ),
    # Outputs differ where a value lies more than three standard deviations below its mean.
    CHECKED: PassRow(
        "equalization",
        "include_cle",
        changes="tails",
        tolerance=0.05,
        summary="layers whose high biases the next one absorbs: {count}; most channels "
        "{amount:.0f}",
    ),
    "dpu_average_pooling": PassRow("dpu_pooling", device="DPU", changes="device"),
    "dpu_leaky_relu": PassRow("activations", device="DPU", changes="device"),
    "dpu_hard_activations": PassRow("activations", device="DPU", changes="device"),
}


def run_passes(
    graph: Graph, settings: Settings, *, device: bool = True, refused: Collection[str] = ()
) -> Graph:
    """Return the graph after every pass that the settings ask for.

    Args:
        graph: as traced.
        settings: say which passes run.
        device: whether passes run that compute as a device does. Without them the graph is the
            float network.
        refused: layers that the pass `CHECKED` must not change.
    """
    for name in _wanted(settings, device=device):
        function = load_pass(name)
        changed = function(graph, refused) if name == CHECKED else function(graph)
        is_other = changed.nodes != graph.nodes or changed.changes != graph.changes
        if GRAPH_PASSES[name].changes != "nothing" and is_other:
            changed = changed.replaced(deviations=(*changed.deviations, name))
        graph = changed
    return graph


def graph_before(checked: str, graph: Graph, settings: Settings) -> Graph | None:
    """Return the float network on which a pass runs, None if the settings do not ask for that
    pass.
    """
    for name in _wanted(settings, device=False):
        if name == checked:
            return graph
        graph = load_pass(name)(graph)
    return None


def _wanted(settings: Settings, *, device: bool = True) -> Iterator[str]:
    """Yield the passes that the settings ask for, in their order.

    Args:
        settings: of the run.
        device: whether passes that compute as a device does are among them.
    """
    for name, row in GRAPH_PASSES.items():
        if row.changes == "device" and not device:
            continue
        if row.device not in (None, settings.target_device):
            continue
        if row.setting is None or getattr(settings, row.setting):
            yield name


def for_device(settings: Settings) -> bool:
    """Return whether the settings ask for a pass that computes as a device does."""
    return any(GRAPH_PASSES[name].changes == "device" for name in _wanted(settings))


def summary(graph: Graph) -> list[str]:
    """Return a line for each pass that changed parameters."""
    lines: list[str] = []
    for name, row in GRAPH_PASSES.items():
        amounts = [change.amount for change in graph.changes if change.rewrite == name]
        if amounts:
            line = row.summary.format(count=len(amounts), amount=max(amounts))
            lines.append(line)
    return lines


def load_pass(name: str) -> Pass:
    """Return the function of a registered pass."""
    module = importlib.import_module(f"{__name__}.{GRAPH_PASSES[name].module}")
    function: Pass = getattr(module, name)
    return function
