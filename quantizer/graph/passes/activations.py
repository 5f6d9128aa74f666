"""Operators that do nothing in inference are left out, activations that a device lacks become
ones that it has.
"""

from dataclasses import replace

from quantizer.graph.ir import Graph, rewire
from quantizer.numerics.integer import LEAKY_SLOPE


def remove_dropout(graph: Graph) -> Graph:
    """The graph without dropout layers; their readers read what dropout read."""
    moved = {node.name: next(node.refs()) for node in graph.nodes if node.op == "dropout"}
    return rewire(graph, moved, moved) if moved else graph


def convert_relu6_to_relu(graph: Graph) -> Graph:
    """Every ReLU6, module or function, becomes a ReLU and keeps its name."""
    return _convert(graph, "relu6", "relu")


def convert_silu_to_hswish(graph: Graph) -> Graph:
    """Every SiLU, module or function, becomes a Hardswish and keeps its name."""
    return _convert(graph, "silu", "hardswish")


def _convert(graph: Graph, old: str, new: str) -> Graph:
    target = f"aten.{new}.default"
    return graph.mapped(
        lambda node: replace(node, op=new, target=target, attrs={}) if node.op == old else node
    )


def dpu_leaky_relu(graph: Graph) -> Graph:
    """Every LeakyReLU with the DPU's slope, 26/256."""
    slope = {"negative_slope": LEAKY_SLOPE[0] / 2 ** LEAKY_SLOPE[1]}
    return graph.mapped(
        lambda node: (
            replace(node, attrs={**node.attrs, **slope}) if node.op == "leaky_relu" else node
        )
    )


def dpu_hard_activations(graph: Graph) -> Graph:
    """Every hardsigmoid as relu6(x + 3) * 2731 / 2^14, every hardswish as x times that in 8
    bits.
    """
    hard = ("hardsigmoid", "hardswish")
    return graph.mapped(
        lambda node: (
            replace(node, target=f"dpu.{node.op}", attrs={}) if node.op in hard else node
        )
    )
