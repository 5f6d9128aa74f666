"""What a plan costs, from the graph alone: bytes of the weights before and after, peak memory
of a calibration pass.
"""

import math
from typing import Any

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_role
from quantizer.graph.ir import Graph, Node, references
from quantizer.numerics.codes import bits_of
from quantizer.numerics.two_level import scale_bytes
from quantizer.plan.model import Plan


def weight_bytes(plan: Plan) -> tuple[int, int]:
    """(float bytes, quantized bytes) of all tensors the graph owns; scales and zero points
    count.
    """
    before = after = 0
    counted: set[str] = set()
    for node in plan.graph.nodes:
        tensors = plan.of_layer(node.name)
        for key, path in node.params.items():
            if path in counted:
                continue
            counted.add(path)
            tensor = plan.graph.tensors[path]
            size = tensor.numel() * tensor.element_size()
            before += size
            planned = tensors.get(parameter_role(key))
            after += (
                size
                if planned is None
                else parameter_bytes(tensor.numel(), planned.spec, planned.scales)
            )
    return before, after


def parameter_bytes(values: int, spec: QuantizationSpec, scales: int) -> int:
    """Of a parameter with that many values and scales, in the bytes that these take; integers
    have zero points, too.
    """
    zero_points = scales if spec.dtype == "int" else 0
    return (
        math.ceil(values * bits_of(spec) / 8)
        + scale_bytes(spec.scale_type, scales)
        + zero_points
    )


def peak_activation_bytes(graph: Graph, batch_size: int) -> int:
    """Most bytes of values alive at once in one pass; values are freed after their last
    reader.
    """
    return max((during for during, _ in alive_bytes(graph, batch_size).values()), default=0)


def alive_bytes(graph: Graph, batch_size: int) -> dict[str, tuple[int, int]]:
    """The bytes of all values that are alive while a node runs, and those that are read after
    it, by its name.

    A value lives as long as its views do.
    """
    order = {node.name: at for at, node in enumerate(graph.nodes)}
    last = order | dict.fromkeys(references(graph.output), len(order))
    for node in reversed(graph.nodes):
        for name in node.refs():
            end = last[node.name] if _is_view(node) else order[node.name]
            last[name] = max(last[name], end)
    freed: dict[int, list[str]] = {}
    for name, end in last.items():
        freed.setdefault(end, []).append(name)
    alive, found = 0, dict[str, tuple[int, int]]()
    for node in graph.nodes:
        alive += value_bytes(graph, node.name, batch_size)
        during = alive
        alive -= sum(
            value_bytes(graph, name, batch_size) for name in freed.get(order[node.name], ())
        )
        found[node.name] = during, alive
    return found


def working_bytes(graph: Graph, node: Node, batch_size: int) -> int:
    """What an operator takes beside its input and output: oneDNN, which runs convolutions,
    copies the larger of them to channels in blocks.
    """
    if not node.row.spatial:
        return 0
    names = (node.name, *node.refs())
    return max(value_bytes(graph, name, batch_size) for name in names)


def value_bytes(graph: Graph, name: str, batch_size: int) -> int:
    """Bytes of one value; views and parameters take none of their own."""
    node = graph.by_name[name]
    if (
        node.shape is None
        or node.dtype is None
        or not (_is_computed(node) or node.op == "input")
    ):
        return 0
    return (
        math.prod(batch_size if size is None else size for size in node.shape)
        * node.dtype.itemsize
    )


def _is_computed(node: Node) -> bool:
    return node.row.fresh or (
        node.row.kind not in ("structural", "unknown") and not _is_view(node)
    )


def _is_view(node: Node) -> bool:
    """Whether its value shares memory with what it reads, as torch declares its operator."""
    if node.row.fresh or next(node.refs(), None) is None:
        return False
    operator: Any = torch.ops
    for part in str(node.target).split("."):
        operator = getattr(operator, part, None)
    schema = getattr(operator, "_schema", None)
    return schema is None or any(each.alias_info is not None for each in schema.returns)
