"""Finds how the operands and results of a layer are quantized, for engines that compute with
integers.
"""

from collections.abc import Iterator
from dataclasses import replace

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import maker
from quantizer.graph.ir import Graph, Node
from quantizer.plan.groups import layout
from quantizer.plan.layout import PART_SCALE, Join, Layout
from quantizer.plan.model import Key, TensorSpecs
from quantizer.plan.readers import values_readers
from quantizer.storage.deferred_tensor import loaded


def input_key(layer: str, graph: Graph, specs: TensorSpecs) -> Key | None:
    """Return where a layer's input is quantized: by the layer itself, or where it was made."""
    for key in ((layer, "input"), *_source_keys(layer, graph)):
        if key in specs:
            return key
    return None


def layer_input_spec(layer: str, graph: Graph, specs: TensorSpecs) -> QuantizationSpec | None:
    """Return how a layer's input is quantized."""
    key = input_key(layer, graph, specs)
    return None if key is None else specs[key]


def output_spec(
    layer: str, graph: Graph, specs: TensorSpecs, where: Layout
) -> QuantizationSpec | None:
    """Return how a layer's output is quantized: where `where` has it, or alike by all readers.

    Args:
        where: the graph's layout.
    """
    for name in _quantization_points(layer, where):
        if (name, "activation") in specs:
            return specs[name, "activation"]
        readers = values_readers(graph, name, where.floats)
        reader_specs = {specs.get((reader, "input")) for reader, _ in readers}
        if len(reader_specs) == 1:
            spec = reader_specs.pop()
            if spec is not None:
                return spec
    return None


def is_narrow(spec: QuantizationSpec | None) -> bool:
    """Return whether a spec is of integers that kernels multiply: 8 bits or fewer."""
    return spec is not None and spec.dtype == "int" and spec.bit_width <= 8


def is_multiplied(node: Node) -> bool:
    """Return whether the role "weights" of a layer is the weight of one product."""
    return node.row.kind == "mac"


def quantized_apart(graph: Graph, solution: Solution, *, any_rounding: bool) -> Solution:
    """Return the solution with values that only a join reads quantized before it, too.

    The codes are the same, and integer kernels can make them. A rounding that takes operators
    in float would cost more than that brings, so only `any_rounding` includes it.
    """
    tensors = dict(solution.tensors)
    where = layout(graph)
    for join in where.joins.values():
        whole = solution.tensors.get((join.group.point, "activation"))
        if whole is None or not is_narrow(whole.spec) or whole.spec.is_dynamic:
            continue
        is_fast_rounding = any_rounding or whole.spec.round_mode == "half_even"
        if not is_fast_rounding or not _keeps_codes(graph, join):
            continue
        factors = _part_factors(graph, where, join)
        for part in join.alone:
            members = [name for name in part.members if name in factors]
            if members:
                alike = replace(whole, scale=whole.scale / factors[members[0]])
                tensors.setdefault((part.point, "activation"), alike)
    return replace(solution, tensors=tensors)


def _keeps_codes(graph: Graph, join: Join) -> bool:
    """Return whether rounding before a join's activation function gives the same codes."""
    for name in join.group.members:
        node = graph.by_name[name]
        is_exact = node.row.keeps_scale or node.row.cuts or node.op == PART_SCALE
        if name != join.name and not is_exact:
            return False
    return True


def _part_factors(graph: Graph, where: Layout, join: Join) -> dict[str, float]:
    """Return the factors of a join's parts before quantization, by the layer that made them."""
    scaling = graph.by_name[join.group.point]
    factors: dict[str, float] = {}
    if scaling.op != PART_SCALE:
        for part in join.alone:
            factors |= dict.fromkeys(part.members, 1.0)
        return factors
    (value,) = scaling.refs()
    if value not in where.origins:
        return {}
    factor_by_channel = loaded(graph.weight(scaling)).tolist()
    first = 0
    for source, length in where.origins[value].parts:
        factors[source] = factor_by_channel[first]
        first += length
    return factors


def _source_keys(layer: str, graph: Graph) -> Iterator[Key]:
    """Yield the outputs of a layer's source, and of those that only hand its value on or join
    parts of it.
    """
    node: Node | None = graph.source(graph.by_name[layer])
    while node is not None:
        role = "input" if node.op == "input" else "activation"
        yield node.name, role
        if node.is_join:
            makers = {maker(graph, name) for name in node.joined()}
            node = graph.by_name[makers.pop()] if len(makers) == 1 else None
        elif node.row.keeps_scale:
            node = graph.source(node)
        else:
            node = None


def _quantization_points(layer: str, where: Layout) -> Iterator[str]:
    """Yield the layers at which a layer's output may be quantized.

    That is with what follows it, or once joined.
    """
    point: str | None = layer
    while point is not None:
        yield point
        point = where.served.get(point)
    for join in where.joins.values():
        if any(layer in part.members for part in join.alone):
            yield join.group.point
