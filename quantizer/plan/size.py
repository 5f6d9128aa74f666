"""What a plan costs, from the graph alone: bytes of the weights before and after, peak memory of a calibration pass."""

import math

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_role
from quantizer.graph.ir import Graph, references
from quantizer.numerics.codes import bits_of
from quantizer.numerics.two_level import scale_bytes
from quantizer.plan.model import Plan


def weight_bytes(plan: Plan) -> tuple[int, int]:
    """(float bytes, quantized bytes) of all tensors the graph owns; scales and zero points count."""
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
            after += size if planned is None else parameter_bytes(tensor.numel(), planned.spec, planned.scales)
    return before, after


def parameter_bytes(values: int, spec: QuantizationSpec, scales: int) -> int:
    """Of a parameter with that many values and scales, in the bytes that these take; integers have zero points, too."""
    zero_points = scales if spec.dtype == "int" else 0
    return math.ceil(values * bits_of(spec) / 8) + scale_bytes(spec.scale_type, scales) + zero_points


def peak_activation_bytes(graph: Graph, batch_size: int) -> int:
    """Most bytes of values alive at once in one pass; values are freed after their last reader."""
    return max((during for during, _ in alive_bytes(graph, batch_size).values()), default=0)


def alive_bytes(graph: Graph, batch_size: int) -> dict[str, tuple[int, int]]:
    """The bytes of all values that are alive while a node runs, and those that are read after it, by its name."""
    kept = set(references(graph.output))
    last = {node.name: node.name for node in graph.nodes}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.refs(), node.name))
    alive, found = 0, dict[str, tuple[int, int]]()
    freed: dict[str, list[str]] = {}
    for name, reader in last.items():
        freed.setdefault(reader, []).append(name)
    for node in graph.nodes:
        alive += _bytes(graph, node.name, batch_size)
        during = alive
        alive -= sum(_bytes(graph, name, batch_size) for name in freed.get(node.name, ()) if name not in kept)
        found[node.name] = during, alive
    return found


def _bytes(graph: Graph, name: str, batch_size: int) -> int:
    """Bytes of one value; views and parameters take none of their own."""
    node = graph.by_name[name]
    if node.shape is None or node.dtype is None or not (node.row.fresh or node.op == "input"):
        return 0
    return math.prod(batch_size if size is None else size for size in node.shape) * node.dtype.itemsize
