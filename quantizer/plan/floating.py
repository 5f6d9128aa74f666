"""Values that stay float whatever a config says, and why: read off the graph alone, before
there is any data.
"""

from collections.abc import Iterable, Iterator, Mapping

from quantizer.graph.axis_rules import ALIKE
from quantizer.graph.ir import Graph, Node, readers, references
from quantizer.plan.arguments import arguments
from quantizer.plan.sentinels import masks, sentinels

DERIVED = "computed from constants and integers alone"
MASK = "may hold sentinels, as a mask's lowest values, which leave no resolution for the others"
BOUNDED = "bounds what a float operator computes"
DENOMINATOR = "divides, and rounding would make small values zero"
COMPARED = "is compared to count an index, and rounding could count none"
ARGUMENT = (
    "makes an angle, an index or what is rounded to integers, and a small error there makes "
    "another value"
)
FLOAT_READERS = "only float operators read it"
UNREAD = "nothing reads it"
RESIDUAL = "only normalizations, and sums that they read, take it"
OUTSIDE = "outside QuantStub … DeQuantStub"

_NORM_PARTS = ("rsqrt", "pow", "square")  # of a normalization that is written by hand
# On either side of a stub
_NEVER = ("size", "constant", "zeros", "ones", "full", "arange", "empty")
_PICKS = ("gather", "take_along_dim", "index_select", "index")  # by integers
_COMPARES = ("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal")
_HANDS_ON = ("compute", "fusable", "passthrough")  # with one operand: a sum, a guard, a slice
_PRODUCTS_PLUS = ("addmm", "baddbmm")  # their first argument is added to a product


def floating(graph: Graph) -> dict[str, str]:
    """The reason for each layer whose values stay float, unless a layer that multiplies reads
    them.
    """
    found = dict.fromkeys(derived(graph), DERIVED)
    constants = set(found)
    found |= dict.fromkeys((name for name in masks(graph) if name not in found), MASK)
    found |= dict.fromkeys(
        (name for name in sentinels(graph, constants) if name not in found), MASK
    )
    found |= dict.fromkeys((name for name in _bounded(graph) if name not in found), BOUNDED)
    found |= dict.fromkeys(
        (name for name in _denominators(graph) if name not in found), DENOMINATOR
    )
    found |= dict.fromkeys((name for name in _compared(graph) if name not in found), COMPARED)
    found |= dict.fromkeys(
        (name for name in arguments(graph, constants) if name not in found), ARGUMENT
    )
    found |= dict.fromkeys(
        (name for name, read_by in graph.consumers.items() if not read_by), UNREAD
    )
    for node in reversed(graph.nodes):
        if node.name not in found and _read_by_float_only(graph, node, found):
            found[node.name] = FLOAT_READERS
    return found


def derived(graph: Graph) -> set[str]:
    """Layers whose values follow from constants, sizes and integer inputs: positions, masks,
    rotations.

    What layers with weights make of integers (an embedding) is not among them.
    """
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "input":
            follows = not node.is_float
        elif node.row.kind == "structural":
            follows = node.op not in ("parameter", "module_input", "dequant_stub")
        else:
            follows = (
                not node.params
                and node.op != "quant_stub"
                and all(name in found for name in node.refs())
            )
        if follows:
            found.add(node.name)
    return found


def multiplied(node: Node, name: str) -> bool:
    """Whether the node multiplies the values of `name`: not a mask that it adds, nor a first
    state.
    """
    if node.row.kind != "mac":
        return False
    added = ("attn_mask", "bias", "hx", *(("input",) if node.op in _PRODUCTS_PLUS else ()))
    return any(
        name in references(value) for key, value in node.inputs.items() if key not in added
    )


def computes_in_float(node: Node, floats: Mapping[str, str]) -> bool:
    """Return whether a node multiplies floats though it could multiply integers; `floats` are
    those of the graph.

    A product with constants does so where it makes an argument. A layer with weights never
    does.
    """
    reason = floats.get(node.name)
    return reason == DERIVED or (reason == ARGUMENT and not node.row.weight)


def outside_stubs(graph: Graph) -> set[str]:
    """Layers outside the part that a model marks with QuantStub and DeQuantStub; none where it
    has no QuantStub.
    """
    if all(node.op != "quant_stub" for node in graph.nodes):
        return set()
    inside: set[str] = set()
    for node in graph.nodes:
        if node.op == "quant_stub" or (
            node.op != "dequant_stub" and any(name in inside for name in node.refs())
        ):
            inside.add(node.name)
    inside |= {
        n.name
        for n in graph.nodes
        if n.op == "parameter" and inside.intersection(graph.consumers[n.name])
    }
    return {
        node.name for node in graph.nodes if node.name not in inside and node.op not in _NEVER
    }


def before_norms(graph: Graph) -> set[str]:
    """Sums that only normalizations read, directly or through more such sums, and what linear
    layers add to them.

    The residual stream of a transformer: some of its channels are a hundred times as large as
    the others, so few bits say nothing about these, and as normalizations compute in float
    nothing is gained by rounding what they read.

    Source: Bondarenko et al., "Understanding and Overcoming the Challenges of Efficient
    Transformer Quantization", 2021, section 3.
    """
    found: set[str] = set()
    for node in reversed(graph.nodes):
        added = node.op in ("add", "sub") or node.row.spatial == 0 or node.row.looks_up
        if added and node.is_float:
            taking = [
                graph.by_name[name] if name else None for name, _ in readers(graph, node.name)
            ]
            if taking and all(
                reader and _feeds_norm(graph, reader, found) for reader in taking
            ):
                found.add(node.name)
    return found


def _feeds_norm(graph: Graph, reader: Node, found: set[str]) -> bool:
    """Whether the reader is a normalization, a part of one, or a sum before one."""
    scaled = reader.op == "mul" and any(
        graph.by_name[name].op == "rsqrt" for name in reader.refs()
    )
    return (
        scaled
        or reader.row.normalizes
        or reader.op in _NORM_PARTS
        or (reader.name in found and not reader.row.weight)
    )


def _bounded(graph: Graph) -> Iterator[str]:
    """Layers that cut off what float operators compute: a norm that is kept from zero before
    something is divided by it would be rounded to zero.
    """
    for node in graph.nodes:
        source = graph.source(node)
        if node.row.kind == "fusable" and source is not None and source.row.kind == "float":
            yield node.name


def _denominators(graph: Graph) -> Iterator[str]:
    """Layers that make what is divided by, back through sums to the products and the layers
    that it comes from.

    The least divisors are the ones that count, and are what rounding makes zero: a guard of
    1e-15 then divides instead.
    """
    divisors = (node.inputs.get(node.row.nonzero) for node in graph.nodes if node.row.nonzero)
    return _made_of(graph, (name for divisor in divisors for name in references(divisor)))


def _compared(graph: Graph) -> Iterator[str]:
    """Layers that make what is compared, where an index is counted from the outcome, as in a
    sparsemax.

    In float one of the comparisons holds, whatever the values are; among rounded ones it may be
    that none does, and the index lies outside.
    """
    picking = (node for node in graph.nodes if node.op in _PICKS)
    pending, seen = [name for node in picking for name in node.refs()], set[str]()
    compared: list[str] = []
    while pending:
        node = graph.by_name[pending.pop()]
        if node.is_float or node.name in seen:
            continue
        seen.add(node.name)
        (compared if node.op in _COMPARES else pending).extend(node.refs())
    return _made_of(graph, compared)


def _made_of(graph: Graph, names: Iterable[str]) -> Iterator[str]:
    """Layers that make these values, back to products, to what computes in float, and to
    integers.
    """
    pending, found = [*names], set[str]()
    while pending:
        node = graph.by_name[pending.pop()]
        if node.name in found or node.row.kind in ("float", "structural") or not node.is_float:
            continue
        found.add(node.name)
        yield node.name
        refs = set(node.refs())
        if (
            len(refs) == 1 and node.row.kind in _HANDS_ON and not node.row.weight
        ) or node.row.axes is ALIKE:
            pending += refs


def _read_by_float_only(graph: Graph, node: Node, floats: dict[str, str]) -> bool:
    """Whether no reader takes integers: then rounding the values would only lose something."""
    if node.row.kind not in ("compute", "nonlinear", "passthrough") and node.op not in (
        "input",
        "parameter",
    ):
        return False
    names = graph.consumers[node.name]
    return (
        node.op != "quant_stub"
        and bool(names)
        and all(_takes_float(graph, name, floats) for name in names)
    )


def _takes_float(graph: Graph, name: str, floats: dict[str, str]) -> bool:
    """Whether the reader of that name runs in float; a DeQuantStub ends what does not, as the
    output does.
    """
    if not name or graph.by_name[name].op == "dequant_stub":
        return False
    return floats.get(name) == FLOAT_READERS or graph.by_name[name].row.kind in (
        "float",
        "unknown",
        "structural",
    )
