"""Values that stay float with any config, and why. This follows from the graph alone, without
data.

Among them are arguments, of which a small error makes another value: angles, values that are
rounded to integers, and indices.
"""

from collections.abc import Iterable, Iterator, Mapping, Set

import torch

from quantizer.graph.channels.axis_rules import ALIKE
from quantizer.graph.ir import Graph, Node, readers, references, walk_back
from quantizer.plan.mask_constants import ORDERS, PRODUCTS_PLUS, mask_constants, masks

DERIVED = "computed from constants and integers alone"
MASK = "may hold mask constants, which leave no resolution for the others"
BOUNDED = "bounds what a float operator computes"
DENOMINATOR = "divides, and rounding would make small values zero"
COMPARED_TO_COUNT = "is compared to count an index, and rounding could count none"
ARGUMENT = (
    "makes an angle, an index or what is rounded to integers, and a small error there makes "
    "another value"
)
FLOAT_READERS = "only float operators read it"
UNREAD = "nothing reads it"
SCALED = "inputs of different units are scaled by channel before they are quantized"
RESIDUAL = "only normalizations, and sums that they read, take it"
OUTSIDE = "outside QuantStub … DeQuantStub"

# Of a normalization that is written by hand
_NORM_PARTS = ("rsqrt", "pow", "square")
# On either side of a stub
_NO_OUTSIDE = ("size", "constant", "zeros", "ones", "full", "arange", "empty")
_SUMS = ("add", "sub")
# They select by integers
_PICKS = ("gather", "take_along_dim", "index_select", "index")
# With one operand: a sum, a guard, a slice
_KEEPS_ZEROS = ("compute", "fusable", "passthrough")
# Their output consists of integers
_KERNELS = ("mac", "fusable")
# They have no quantization
_UNQUANTIZED = ("passthrough", "structural")


def floating(graph: Graph) -> dict[str, str]:
    """Return the reason for each layer whose values stay float, unless a layer that multiplies
    reads them. The first reason counts.
    """
    constants = derived_layers(graph)
    layers_by_reason = (
        (DERIVED, constants),
        (MASK, masks(graph)),
        (MASK, mask_constants(graph, constants)),
        (BOUNDED, _bounded(graph)),
        (DENOMINATOR, _denominators(graph)),
        (COMPARED_TO_COUNT, _compared(graph)),
        (ARGUMENT, exact_arguments(graph, constants)),
        (SCALED, scaled_inputs(graph)),
        (UNREAD, [name for name, names in graph.consumers.items() if not names]),
    )
    reasons: dict[str, str] = {}
    for reason, names in layers_by_reason:
        for name in names:
            reasons.setdefault(name, reason)
    for node in reversed(graph.nodes):
        if node.name not in reasons and _has_only_float_readers(graph, node, reasons):
            reasons[node.name] = FLOAT_READERS
    return reasons


def derived_layers(graph: Graph) -> set[str]:
    """Return the layers whose values follow from constants, sizes and integer inputs, as
    positions, masks and rotations do.

    The outputs of layers with weights that read integers, as an embedding does, do not.
    """
    names: set[str] = set()
    for node in graph.nodes:
        if node.op == "input":
            follows = not node.is_float
        elif node.row.kind == "structural":
            follows = node.row.is_constant
        elif node.params or node.op == "quant_stub":
            follows = False
        else:
            follows = names.issuperset(node.refs())
        if follows:
            names.add(node.name)
    return names


def input_values(graph: Graph, *, with_sums: bool = False) -> set[str]:
    """Return the layers whose values are computed of floating-point inputs and constants alone,
    before any matrix multiplies them. Normalizations and factors of channels are among them.

    Args:
        graph: of the network.
        with_sums: whether sums of such values with others count, too, as residuals around the
            first layers are.
    """
    constants = derived_layers(graph)
    constants.update(node.name for node in graph.nodes if node.op == "parameter")
    names: set[str] = set()
    for node in graph.nodes:
        operands = set(node.refs())
        is_matrix = node.row.kind == "mac" and not node.row.scales_channels
        if node.op == "input" and node.is_float:
            names.add(node.name)
        elif is_matrix or node.row.looks_up or names.isdisjoint(operands):
            continue
        elif operands <= names | constants or (with_sums and node.op in _SUMS):
            names.add(node.name)
    return names


def scaled_inputs(graph: Graph) -> set[str]:
    """Return the layers of `input_values` whose channels are scaled before they are quantized,
    back to the inputs.

    A join that is scaled is quantized behind the factors anyway.
    """
    scales = [node for node in graph.nodes if node.op == "input_scale"]
    if not scales:
        return set()
    names = input_values(graph)
    sources = []
    for node in scales:
        source = graph.source(node)
        if source is not None and not source.is_join:
            sources.append(source.name)
    return ancestors(graph, sources, names)


def ancestors(graph: Graph, starts: Iterable[str], names: set[str]) -> set[str]:
    """Return those of `names` that are among some nodes, or that these are computed of through
    others of `names`.
    """

    def operands(node: Node) -> set[str]:
        return names.intersection(node.refs())

    nodes = walk_back(graph, names.intersection(starts), operands)
    return {node.name for node in nodes}


def multiplies_values(node: Node, name: str) -> bool:
    """Return whether the node multiplies the values of `name`: not if they are a mask that it
    adds, or a first state.
    """
    if node.row.kind != "mac":
        return False
    added = ["attn_mask", "bias", "hx"]
    if node.op in PRODUCTS_PLUS:
        added.append("input")
    factors = [value for key, value in node.inputs.items() if key not in added]
    return name in references(factors)


def computes_in_float(node: Node, floats: Mapping[str, str]) -> bool:
    """Return whether a node multiplies floats though it could multiply integers. `floats` are
    those of the graph.

    A product with constants does so if its value is an argument. A layer with weights never
    does.
    """
    reason = floats.get(node.name)
    return reason == DERIVED or (reason == ARGUMENT and not node.row.weight)


def outside_stubs(graph: Graph) -> set[str]:
    """Return the layers outside the part that a model marks with QuantStub and DeQuantStub. A
    model without QuantStub has none.
    """
    inside: set[str] = set()
    for node in graph.nodes:
        is_after = node.op != "dequant_stub" and not inside.isdisjoint(node.refs())
        if node.op == "quant_stub" or is_after:
            inside.add(node.name)
    if not inside:
        return set()
    outside: set[str] = set()
    for node in graph.nodes:
        if node.name in inside or node.op in _NO_OUTSIDE:
            continue
        if node.op != "parameter" or inside.isdisjoint(graph.consumers[node.name]):
            outside.add(node.name)
    return outside


def before_norms(graph: Graph) -> set[str]:
    """Return the sums that only normalizations read, directly or through more such sums, and
    the outputs of linear layers that are added to them.

    They are the residual stream of a transformer. Some of its channels are a hundred times as
    large as the others, so that few bits leave nothing of these. Normalizations compute in
    float, so nothing is gained by rounding their inputs.

    Source: Bondarenko et al., "Understanding and Overcoming the Challenges of Efficient
    Transformer Quantization", 2021, section 3.
    """
    names: set[str] = set()
    for node in reversed(graph.nodes):
        is_sum = node.op in _SUMS
        is_added = is_sum or node.row.spatial == 0 or node.row.looks_up
        if not is_added or not node.is_float:
            continue
        reading = [name for name, _ in readers(graph, node.name)]
        # "" is the network's output
        if not reading or "" in reading:
            continue
        if all(_feeds_norm(graph, graph.by_name[name], names) for name in reading):
            names.add(node.name)
    return names


def normalizes(graph: Graph, node: Node) -> bool:
    """Return whether a node is a normalization, or the product that ends one written by
    hand.
    """
    if node.row.normalizes:
        return True
    return node.op == "mul" and any(graph.by_name[name].op == "rsqrt" for name in node.refs())


def _feeds_norm(graph: Graph, reader: Node, before_norms: set[str]) -> bool:
    """Return whether the reader is a normalization, a part of one, or a sum before one."""
    if normalizes(graph, reader) or reader.op in _NORM_PARTS:
        return True
    return reader.name in before_norms and not reader.row.weight


def _bounded(graph: Graph) -> Iterator[str]:
    """Yield layers that bound the output of float operators: a norm that is kept from zero,
    before something is divided by it, would be rounded to zero.
    """
    for node in graph.nodes:
        source = graph.source(node)
        if node.row.kind == "fusable" and source is not None and source.row.kind == "float":
            yield node.name


def _denominators(graph: Graph) -> Iterator[str]:
    """Yield layers whose values are divisors, back through sums to the products and the layers
    that the sums consist of.

    The smallest divisors matter most, and rounding would make them zero: then a guard of 1e-15
    would divide instead.
    """
    divisors: list[str] = []
    for node in graph.nodes:
        if node.row.nonzero:
            divisors.extend(references(node.inputs.get(node.row.nonzero)))
    return _origins(graph, divisors)


def _compared(graph: Graph) -> Iterator[str]:
    """Yield layers whose values are compared to count an index, as in a sparsemax.

    In float one of the comparisons holds for any values. Of rounded values none may,
    and the index is outside.
    """

    def operands(node: Node) -> Iterable[str]:
        return () if node.is_float or node.op in ORDERS else node.refs()

    picks: list[str] = []
    for node in graph.nodes:
        if node.op in _PICKS:
            picks.extend(node.refs())
    compared: list[str] = []
    for node in walk_back(graph, picks, operands):
        if node.op in ORDERS and not node.is_float:
            compared.extend(node.refs())
    return _origins(graph, compared)


def _origins(graph: Graph, names: Iterable[str]) -> Iterator[str]:
    """Yield the layers from which values come, back to products, to float operators, and to
    integers.
    """

    def is_inside(node: Node) -> bool:
        return node.is_float and node.row.kind not in ("float", "structural")

    def operands(node: Node) -> set[str]:
        if not is_inside(node):
            return set()
        read = set(node.refs())
        has_one = len(read) == 1 and node.row.kind in _KEEPS_ZEROS and not node.row.weight
        return read if has_one or node.row.axes is ALIKE else set()

    for node in walk_back(graph, names, operands):
        if is_inside(node):
            yield node.name


def _has_only_float_readers(graph: Graph, node: Node, floats: dict[str, str]) -> bool:
    """Return whether no reader needs integers, so that rounding the values is of no use."""
    is_source = node.op in ("input", "parameter")
    if not is_source and node.row.kind not in ("compute", "nonlinear", "passthrough"):
        return False
    names = graph.consumers[node.name]
    if node.op == "quant_stub" or not names:
        return False
    return all(_takes_float(graph, name, floats) for name in names)


def _takes_float(graph: Graph, name: str, floats: dict[str, str]) -> bool:
    """Return whether the reader of that name runs in float. A DeQuantStub does not, nor does
    the output.
    """
    if not name or graph.by_name[name].op == "dequant_stub":
        return False
    if floats.get(name) == FLOAT_READERS:
        return True
    return graph.by_name[name].row.kind in ("float", "unknown", "structural")


def exact_arguments(graph: Graph, constants: Set[str]) -> Set[str]:
    """Return the layers whose values are arguments of sines, are rounded to integers, or are
    indices.

    They are searched backwards. Other readers of such a value quantize their outputs, and a
    layer that multiplies it quantizes its own input. The output of a kernel of integers, as a
    layer with weights is, is not an argument if the network returns it as well.
    """
    alone: set[str] = set()
    shared: set[str] = set()
    for node in reversed(graph.nodes):
        may_be = node.row.kind != "structural" or node.op in ("input", "parameter")
        if not may_be or node.name in constants or not _has_fractions(node):
            continue
        # Integers are moved after a cast to them
        reads = list(readers(graph, node.name, lambda move, _: _is_cast_to_integers(move)))
        exact_reads = [read for read in reads if _is_argument(graph, read, alone, constants)]
        if reads and len(exact_reads) == len(reads):
            alone.add(node.name)
        elif _may_be_shared(node, reads):
            known = alone | shared
            if any(_is_argument(graph, read, known, constants) for read in reads):
                shared.add(node.name)
    return alone | shared


def _may_be_shared(node: Node, reads: list[tuple[str, str]]) -> bool:
    """Return whether a value may be an argument though other readers do not need it exact."""
    if node.row.kind in _KERNELS:
        return all(reader for reader, _ in reads)
    return node.op == "input" or node.row.kind not in _UNQUANTIZED


def _is_argument(
    graph: Graph, read: tuple[str, str], arguments: Set[str], constants: Set[str]
) -> bool:
    """Return whether a reader takes a value as an argument, or computes arguments from it and
    from constants.
    """
    name, value = read
    if not name:
        return False
    reader = graph.by_name[name]
    if _is_cast_to_integers(reader):
        return True
    for key in _exact_inputs(reader):
        if value in references(reader.inputs.get(key)):
            return True
    if name not in arguments or reader.row.weight:
        return False
    others = list(reader.refs())
    others.remove(value)
    return reader.row.kind != "mac" or constants >= set(others)


def _exact_inputs(node: Node) -> tuple[str, ...]:
    """Return the inputs that its operator needs exact, with some settings or always."""
    if node.op == "div" and node.attrs.get("rounding_mode"):
        return ("input", "other")
    if node.op == "exp" and node.dtype is not None and node.dtype.is_complex:
        # A cosine and a sine
        return ("input",)
    return node.row.exact


def _has_fractions(node: Node) -> bool:
    """Return whether the node's value is one tensor of floating-point or complex numbers."""
    return node.dtype is not None and (node.dtype.is_floating_point or node.dtype.is_complex)


def _is_cast_to_integers(node: Node) -> bool:
    """Return whether a node casts to integers. A cast to truth values is a comparison."""
    return node.op == "to" and node.dtype != torch.bool and not _has_fractions(node)
