"""LeakyReLU, hardsigmoid and hardswish with the constants that the DPU has, in the integers it has."""

from __future__ import annotations

import dataclasses

from quantizer.graph.ir import Graph
from quantizer.numerics.integer import LEAKY_SLOPE


def dpu_leaky_relu(graph: Graph) -> Graph:
    """Every LeakyReLU with the DPU's slope, 26/256."""
    multiplier, shift = LEAKY_SLOPE
    nodes = tuple(
        dataclasses.replace(node, attrs={**node.attrs, "negative_slope": multiplier / 2**shift})
        if node.op == "leaky_relu"
        else node
        for node in graph.nodes
    )
    return graph.replaced(nodes=nodes)


def dpu_hard_activations(graph: Graph) -> Graph:
    """Every hardsigmoid as relu6(x + 3) * 2731 / 2^14, every hardswish as x times that in 8 bits."""
    nodes = tuple(
        dataclasses.replace(node, target=f"dpu.{node.op}", attrs={})
        if node.op in ("hardsigmoid", "hardswish")
        else node
        for node in graph.nodes
    )
    return graph.replaced(nodes=nodes)
