"""Make tables about the DPU: its integer arithmetic compared with the simulation, and the
layers that it can run.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from quantizer.evaluation.exact import ExactComparison
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.integer import HARDSWISH_POSITION, LEAKY_SLOPE, SIXTH
from quantizer.plan.dpu_support import Verdict
from quantizer.report.tables import shape_text
from quantizer.report.view import Listing, TableView


def exact_table(comparison: ExactComparison, view: TableView) -> Listing:
    """Return a table with a row for each tensor with codes, in execution order. If there are
    too many, those with the most differing codes are shown.
    """
    lines = []
    ranks = []
    for row in comparison.layers:
        numbers = (row.position, row.codes, row.differing, row.most_steps)
        lines.append((row.layer, row.role, *map(str, numbers)))
        rank = None
        if row.differing:
            rank = -row.differing / row.codes
        ranks.append(rank)
    titles = ("layer", "tensor", "position", "codes", "differing", "at most steps")
    return view.listing(
        titles, lines, ranks, numbers=titles[2:], what="tensor", idle="without a difference"
    )


def support_table(graph: Graph, verdicts: Mapping[str, Verdict], view: TableView) -> Listing:
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


def approximations(graph: Graph, reference: Graph) -> Iterator[str]:
    """Yield a line for each layer that the DPU computes differently than the float network.

    Args:
        graph: after the passes for the DPU.
        reference: the graph before.
    """
    for node in graph.nodes:
        before = reference.by_name[node.name]
        if (node.target, node.attrs) != (before.target, before.attrs):
            describe = _DESCRIPTIONS[node.op]
            yield f"approximated: {node.name}: {describe(node, before)}"


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
