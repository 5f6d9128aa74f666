"""The cost of a plan, from the graph alone: bytes of the weights before and after, and peak
memory of a calibration pass.
"""

import math
from collections import Counter
from typing import Any

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_role
from quantizer.graph.ir import Graph, Node, references
from quantizer.numerics.codes import bits_of
from quantizer.numerics.formats import scale_bytes
from quantizer.plan.model import Plan
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.tables import NUMBER_FORMATS

COPIES = 4
"""Copies of a weight in its own dtype while it is rounded, compared or decoded."""
HOLES = 1.65
"""The ratio of resident to used memory for blocks that are not mapped, due to fragmentation of
the heap within a pass. Measured on images: 1.5 to 2.5.
"""
MAPPED = 32 << 20
"""Bytes from which glibc maps every block."""


def weight_bytes(plan: Plan) -> tuple[int, int]:
    """Return the float bytes and the quantized bytes of all parameters of the graph, with
    scales and zero points.
    """
    before = 0
    after = 0
    counted: set[str] = set()
    for node in plan.graph.nodes:
        tensors = plan.of_layer(node.name)
        for key, path in node.params.items():
            if path in counted:
                continue
            counted.add(path)
            value = plan.graph.tensors[path]
            size = value.numel() * value.element_size()
            before += size
            tensor = tensors.get(parameter_role(key))
            if tensor is not None:
                size = parameter_bytes(value.numel(), tensor.spec, tensor.scales)
            after += size
    return before, after


def parameter_bytes(values: int, spec: QuantizationSpec, scales: int) -> int:
    """Return the bytes of a parameter with so many values and scales. Integers have zero
    points, too.
    """
    code_bytes = math.ceil(values * bits_of(spec) / 8)
    if spec.dtype in NUMBER_FORMATS and NUMBER_FORMATS[spec.dtype].scale_bits:
        return code_bytes + scales * NUMBER_FORMATS[spec.dtype].scale_bits // 8
    zero_point_bytes = scales if spec.dtype == "int" else 0
    return code_bytes + scale_bytes(spec.scale_type, scales) + zero_point_bytes


def peak_activation_bytes(graph: Graph, batch_size: int) -> int:
    """Return the most bytes of values alive at once in one pass. Values are freed after their
    last reader.
    """
    alive = alive_bytes(graph, batch_size).values()
    return max((during for during, _ in alive), default=0)


def alive_bytes(graph: Graph, batch_size: int) -> dict[str, tuple[int, int]]:
    """Return for each node the bytes of all values that are alive while it runs, and of those
    that are read after it.

    A value lives as long as its views do.
    """
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    last_uses = order | dict.fromkeys(references(graph.output), len(order))
    for node in reversed(graph.nodes):
        last_use = last_uses[node.name] if _is_view(node) else order[node.name]
        for name in node.refs():
            last_uses[name] = max(last_uses[name], last_use)
    freed_bytes: Counter[int] = Counter()
    for name, last_use in last_uses.items():
        freed_bytes[last_use] += value_bytes(graph, name, batch_size)
    alive: dict[str, tuple[int, int]] = {}
    current = 0
    for index, node in enumerate(graph.nodes):
        during = current + value_bytes(graph, node.name, batch_size)
        current = during - freed_bytes[index]
        alive[node.name] = during, current
    return alive


def working_bytes(graph: Graph, node: Node, batch_size: int) -> int:
    """Return the bytes that an operator needs besides its input and output: oneDNN, which runs
    convolutions, copies the larger of them to channels in blocks.
    """
    if not node.row.spatial:
        return 0
    names = (node.name, *node.refs())
    return max(value_bytes(graph, name, batch_size) for name in names)


def value_bytes(graph: Graph, name: str, batch_size: int) -> int:
    """Return the bytes of one value. Views and parameters take none of their own."""
    node = graph.by_name[name]
    has_memory = node.op == "input" or _is_computed(node)
    if node.shape is None or node.dtype is None or not has_memory:
        return 0
    sizes = [batch_size if size is None else size for size in node.shape]
    return math.prod(sizes) * node.dtype.itemsize


def _is_computed(node: Node) -> bool:
    if node.row.fresh:
        return True
    return node.row.kind not in ("structural", "unknown") and not _is_view(node)


def _is_view(node: Node) -> bool:
    """Return whether its value shares memory with an input, as torch declares its operator."""
    if node.row.fresh or next(node.refs(), None) is None:
        return False
    operator: Any = torch.ops
    for part in str(node.target).split("."):
        operator = getattr(operator, part, None)
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return True
    return any(result.alias_info is not None for result in schema.returns)


def pass_bytes(graph: Graph, size: int, stop: int | None = None) -> int:
    """Return the bytes for one batch of `size` samples, up to the node of index `stop`."""
    alive = alive_bytes(graph, size)
    peak = 0
    for node in graph.nodes[:stop]:
        during, _ = alive[node.name]
        working = working_bytes(graph, node, size) + read_bytes(graph, node)
        value = value_bytes(graph, node.name, size)
        peak = max(peak, resident_bytes(graph, during + working, value))
    return peak


def read_bytes(graph: Graph, node: Node) -> int:
    """Return the bytes of the parameters that are read from files for this node."""
    total = 0
    for path in node.params.values():
        tensor = graph.tensors[path]
        if isinstance(tensor, DeferredTensor):
            total += tensor.nbytes
    return total


def resident_bytes(graph: Graph, used: int, value: int, *, copies: int = 1) -> int:
    """Return how many bytes are resident for `used` bytes, among them `copies` of a value."""
    mapped = 0
    if graph.is_deferred:
        mapped = used
    elif value >= MAPPED:
        mapped = copies * value
    return mapped + int(HOLES * (used - mapped))
