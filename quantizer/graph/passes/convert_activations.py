"""Activations that devices lack, replaced by ones they have: this changes the float function, if the config asks."""

from __future__ import annotations

import dataclasses

from quantizer.graph.ir import Graph


def convert_relu6_to_relu(graph: Graph) -> Graph:
    """Every ReLU6, module or function, becomes a ReLU and keeps its name."""
    return _convert(graph, "relu6", "relu")


def convert_silu_to_hswish(graph: Graph) -> Graph:
    """Every SiLU, module or function, becomes a Hardswish and keeps its name."""
    return _convert(graph, "silu", "hardswish")


def _convert(graph: Graph, old: str, new: str) -> Graph:
    nodes = tuple(
        dataclasses.replace(node, op=new, target=f"aten.{new}.default", attrs={}) if node.op == old else node
        for node in graph.nodes
    )
    return graph.replaced(nodes=nodes)
