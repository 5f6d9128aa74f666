"""Passes that remove operators without effect in inference, and replace activations that a
device lacks.
"""

from dataclasses import replace
from typing import Any

from quantizer.graph.ir import Graph, Node, rewire


def remove_dropout(graph: Graph) -> Graph:
    """Return the graph without dropout layers."""
    moved: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "dropout":
            moved[node.name] = next(node.refs())
    return rewire(graph, moved, moved) if moved else graph


def convert_relu6_to_relu(graph: Graph) -> Graph:
    """Convert every ReLU6, module or function, to a ReLU of the same name."""
    return _convert(graph, "relu6", op="relu", target="aten.relu.default")


def convert_silu_to_hswish(graph: Graph) -> Graph:
    """Convert every SiLU, module or function, to a Hardswish of the same name."""
    return _convert(graph, "silu", op="hardswish", target="aten.hardswish.default")


def dpu_leaky_relu(graph: Graph) -> Graph:
    """Give every LeakyReLU the DPU's slope, 26/256."""
    # Only the DPU needs it
    from quantizer.numerics.integer import LEAKY_SLOPE

    numerator, shift = LEAKY_SLOPE
    slope = numerator / 2**shift
    return _convert(graph, "leaky_relu", attrs={"negative_slope": slope})


def dpu_hard_activations(graph: Graph) -> Graph:
    """Compute hardsigmoid as relu6(x + 3) * 2731 / 2^14, and hardswish as x times that in 8
    bits.
    """
    for op in ("hardsigmoid", "hardswish"):
        graph = _convert(graph, op, target=f"dpu.{op}")
    return graph


def _convert(graph: Graph, old: str, **changes: Any) -> Graph:
    """Return the graph with changes to all nodes of an operator, which lose their constants."""
    changes.setdefault("attrs", {})

    def converted(node: Node) -> Node:
        return replace(node, **changes) if node.op == old else node

    return graph.mapped(converted)
