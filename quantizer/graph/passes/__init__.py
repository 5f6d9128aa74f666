"""Rewrites between tracing and planning, registered by name, run in the order of `PASSES`.

A pass keeps the names of the layers that survive and, unless its row says otherwise, the float
function to rounding; it never sees a scale.
"""

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from quantizer.config.model import Settings
from quantizer.graph.ir import Graph

Pass = Callable[..., Graph]
"""From a graph to a graph; one that a check on data limits also takes the layers that it must
leave alone.
"""
CHECKED = "absorb_high_biases"
"""The pass that calibration checks on data, layer by layer."""


@dataclass(frozen=True)
class PassRow:
    """One pass: its module, the setting and the device that switch it on (None: always), and
    what it keeps.

    `changes` says what it does to the float function: "nothing", "tails" (nothing but for
    values that batch norms have hardly seen), "on purpose" (the config asks for it), or
    "device" (what the device computes instead; the float network that test mode compares layers
    with is left alone). Outputs differ by less than `tolerance` of the largest where it changes
    nothing or tails. `summary` is a sentence on its `Graph.changes`, with their count and the
    largest amount.
    """

    module: str
    setting: str | None = None
    device: str | None = None
    changes: Literal["nothing", "tails", "on purpose", "device"] = "nothing"
    tolerance: float = 1e-5
    summary: str = ""


PASSES: dict[str, PassRow] = {
    "remove_dropout": PassRow("activations"),
    "compute_weights": PassRow("compute_weights"),
    "separate_biases": PassRow("separate_biases"),
    "linear_from_matmul": PassRow("linear_from_matmul"),
    "linear_of_experts": PassRow("linear_of_experts"),
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
        device: whether those that compute as a device does run; without them it is the float
            network.
        refused: layers that the pass `CHECKED` leaves alone.
    """
    for name in _wanted(settings, device=device):
        changed = load_pass(name)(graph, refused) if name == CHECKED else load_pass(name)(graph)
        is_another = changed.nodes != graph.nodes or changed.changes != graph.changes
        if PASSES[name].changes != "nothing" and is_another:
            changed = changed.replaced(deviations=(*changed.deviations, name))
        graph = changed
    return graph


def graph_before(checked: str, graph: Graph, settings: Settings) -> Graph | None:
    """Return the float network as a pass finds it, or None if the settings do not ask for that
    pass.
    """
    for name in _wanted(settings, device=False):
        if name == checked:
            return graph
        graph = load_pass(name)(graph)
    return None


def _wanted(settings: Settings, *, device: bool) -> Iterator[str]:
    """The passes that run, in their order."""
    for name, row in PASSES.items():
        if _is_wanted(row, settings) and (device or row.changes != "device"):
            yield name


def for_device(settings: Settings) -> bool:
    """Whether a pass that the settings ask for makes another network of the graph, as a device
    has it.
    """
    return any(row.changes == "device" and _is_wanted(row, settings) for row in PASSES.values())


def _is_wanted(row: PassRow, settings: Settings) -> bool:
    return row.device in (None, settings.target_device) and (
        row.setting is None or getattr(settings, row.setting)
    )


def summary(graph: Graph) -> list[str]:
    """What the passes did to parameters, a line for each pass that did anything."""
    lines = []
    for name, row in PASSES.items():
        if amounts := [change.amount for change in graph.changes if change.rewrite == name]:
            lines.append(row.summary.format(count=len(amounts), amount=max(amounts)))
    return lines


def load_pass(name: str) -> Pass:
    """The function of a registered pass."""
    function: Pass = getattr(importlib.import_module(f"{__name__}.{PASSES[name].module}"), name)
    return function
