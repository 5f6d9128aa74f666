"""Tables about the DPU: its integers against the simulation, and what it can run."""

import math
from collections.abc import Callable, Iterator, Mapping

from quantizer.evaluation.exact import ExactComparison
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.integer import HARDSWISH_POSITION, LEAKY_SLOPE, SIXTH
from quantizer.plan.dpu_support import Verdict
from quantizer.report.tables import shape_text
from quantizer.report.view import Listing, View


def exact_table(found: ExactComparison, view: View) -> Listing:
    """One line per tensor with codes, in execution order; the first to show are those with the
    most wrong ones.
    """
    rows = [
        (
            row.layer,
            row.role,
            str(row.position),
            str(row.codes),
            str(row.differing),
            str(row.most_steps),
        )
        for row in found.layers
    ]
    titles = ("layer", "tensor", "position", "codes", "differing", "at most steps")
    ranks = [-row.differing / row.codes if row.differing else None for row in found.layers]
    return view.listing(
        titles, rows, ranks, numbers=titles[2:], what="tensor", idle="without a difference"
    )


def support_table(graph: Graph, found: Mapping[str, Verdict], view: View) -> Listing:
    """One line per layer: what runs it, and why not the DPU; the first to show are those that
    the DPU cannot run.
    """
    rows = [
        (
            node.name,
            node.op,
            shape_text(node),
            found[node.name].device,
            found[node.name].why or found[node.name].engine,
        )
        for node in graph.nodes
    ]
    ranks = [{"CPU": 0.0, "DPU": 1.0}.get(found[node.name].device) for node in graph.nodes]
    titles = ("layer", "operator", "output", "device", "engine, or why not")
    return view.listing(titles, rows, ranks, idle="computing nothing")


def approximations(graph: Graph, reference: Graph) -> Iterator[str]:
    """One line per layer that the DPU computes in another way than the float network."""
    for node in graph.nodes:
        before = reference.by_name[node.name]
        if (node.target, node.attrs) != (before.target, before.attrs):
            yield f"approximated: {node.name}: {_WORDS[node.op](node, before)}"


def _average(node: Node, before: Node) -> str:
    multiplier, shift = node.attrs["multiplier"], node.attrs["shift"]
    height, width = node.attrs["kernel_size"]
    share = multiplier * height * width / 2**shift
    effect = "which is exact" if share == 1 else f"which is {share:.6g} of the mean"
    return f"the average of {height}x{width} is its sum * {multiplier} / 2^{shift}, {effect}"


def _leaky_relu(node: Node, before: Node) -> str:
    multiplier, shift = LEAKY_SLOPE
    return (
        f"its slope is {multiplier} / 2^{shift}, in float it is "
        f"{before.attrs.get('negative_slope', 0.01):.6g}"
    )


def _hardsigmoid(node: Node, before: Node) -> str:
    return (
        f"relu6(x + 3) * {SIXTH[0]} / 2^{SIXTH[1]}, which is "
        f"{6 * SIXTH[0] / 2 ** SIXTH[1]:.6g} of the float slope"
    )


def _hardswish(node: Node, before: Node) -> str:
    largest = 1 - math.ldexp(1, -HARDSWISH_POSITION)
    return (
        f"x times its hardsigmoid in 8 bits at position {HARDSWISH_POSITION}, which is at "
        f"most {largest:.6g}"
    )


_WORDS: dict[str, Callable[[Node, Node], str]] = {
    **dict.fromkeys(("avg_pool2d", "adaptive_avg_pool2d", "mean"), _average),
    "leaky_relu": _leaky_relu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
}
