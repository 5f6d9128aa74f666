"""Passes that replace activations that a device lacks or an engine is slow at."""

from dataclasses import replace
from typing import Any

from quantizer.graph.ir import Graph, Node, Ref

_GATES = {
    "silu": ("sigmoid", "aten.sigmoid.default"),
    "hardswish": ("hardsigmoid", "aten.hardsigmoid.default"),
}
"""By operator, the operator and the target of its gate."""


def convert_relu6_to_relu(graph: Graph) -> Graph:
    """Convert every ReLU6, module or function, to a ReLU of the same name."""
    return convert_activation(graph, "relu6", op="relu", target="aten.relu.default")


def convert_silu_to_hswish(graph: Graph) -> Graph:
    """Convert every SiLU, module or function, to a Hardswish of the same name."""
    return convert_activation(graph, "silu", op="hardswish", target="aten.hardswish.default")


def integer_activations(graph: Graph) -> Graph:
    """Return the graph with activations as engines compute them between codes.

    A LeakyReLU reads codes, and no longer belongs to the layer before it. A SiLU or Hardswish
    `x` is the product of its input and of a gate `x_gate`, which gets codes, too. What the
    network returns stays as it is.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        is_inside = "" not in graph.consumers[node.name]
        if is_inside and node.op == "leaky_relu":
            nodes.append(replace(node, op="apart_leaky_relu"))
        elif is_inside and node.op in _GATES:
            op, target = _GATES[node.op]
            gate = replace(node, name=f"{node.name}_gate", op=op, target=target)
            inputs = {**node.inputs, "other": Ref(gate.name)}
            product = replace(node, op="mul", target="aten.mul.Tensor", inputs=inputs)
            nodes += [gate, product]
        else:
            nodes.append(node)
    return graph.replaced(nodes=tuple(nodes))


def convert_activation(graph: Graph, old: str, **changes: Any) -> Graph:
    """Return the graph with changes to all nodes of an operator, which lose their constants."""
    changes.setdefault("attrs", {})

    def converted(node: Node) -> Node:
        return replace(node, **changes) if node.op == old else node

    return graph.mapped(converted)
