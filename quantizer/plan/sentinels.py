"""Values that stand for "not this one": the lowest that a softmax makes zero, and the
highest.
"""

import math
from collections.abc import Iterator, Set

from quantizer.graph.far_values import FAR, far_value
from quantizer.graph.ir import Graph, Node, readers, references

_FACTOR = 1e4  # what turns a mask of zeros and ones into such values
_FILLS = (
    "masked_fill",
    "where",
    "full",
    "full_like",
    "new_full",
    "scalar_tensor",
    "index_fill",
)
_CARRIES = (
    *("add", "sub", "rsub", "mul", "div", "where", "masked_fill", "minimum", "cat", "stack"),
    *(
        "slice_scatter",
        "select_scatter",
        "diagonal_scatter",
        "scatter",
        "masked_scatter",
        "index_put",
        "index_copy",
    ),
    "index_fill",
)
_PRODUCTS_PLUS = ("addmm", "baddbmm")
# With a number, of which only those that end in one of the next count
_FILLS_TOO = ("scatter", "pad", "index_put")
_ENDS = (
    *(
        "sigmoid",
        "hardsigmoid",
        "log_sigmoid",
        "tanh",
        "softmax",
        "log_softmax",
        "exp",
        "logsumexp",
    ),
    *("max", "min", "amax", "amin", "argmax", "argmin", "topk", "sort", "argsort", "kthvalue"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal"),
    *("isinf", "isfinite", "isnan"),
)
"""What makes of a sentinel a value like others: one that saturates, chooses or compares."""
_MIRRORS = ("neg", "abs")
_LOGARITHMS = ("log", "log2", "log10", "special_logit")  # of a mask's zeros


def masks(graph: Graph) -> Iterator[str]:
    """Layers whose values may be as low as a mask's, from where such values arise to where a
    softmax takes them.
    """
    found: set[str] = set()
    for node in graph.nodes:
        moved = (
            node.refs() if node.row.kind == "passthrough" or node.op in _CARRIES else iter(())
        )
        carried = references(node.inputs.get("input")) if node.op in _PRODUCTS_PLUS else moved
        if (
            _is_mask_input(graph, node)
            or _fills_lowest(graph, node)
            or not found.isdisjoint(carried)
        ):
            found.add(node.name)
            yield node.name


def chooses(node: Node) -> bool:
    """Return whether a node chooses among values, as a maximum does, so that sentinels are left
    behind.
    """
    return node.row.kind == "passthrough" and node.op in _ENDS


def sentinels(graph: Graph, constants: Set[str]) -> Iterator[str]:
    """Yield layers whose values may be sentinels of either sign, and end where these say no
    more than "none".

    That end tells a sentinel from a constant that is large because pixels are: each reader
    saturates, chooses or compares. So few layers can be meant by mistake, and none that
    multiplies. `constants` are the layers whose values follow from constants.
    """
    ending = _ending(graph)
    far: set[str] = set()
    for node in graph.nodes:
        is_source = _fills_far(node) or (node.op in _LOGARITHMS and node.name in constants)
        if node.op == "constant" or (node.op == "parameter" and node.name in ending):
            is_source = _held(graph, node) is not None
        if is_source or not far.isdisjoint(_handed_on(node, constants)):
            far.add(node.name)
            if node.name in ending:
                yield node.name


def _fills_far(node: Node) -> bool:
    """Whether the node fills in a number that may be a sentinel."""
    return node.op in (*_FILLS, *_FILLS_TOO) and any(
        abs(number) >= FAR for number in _numbers(node)
    )


def _handed_on(node: Node, constants: Set[str]) -> Iterator[str]:
    """What the node reads that is a sentinel in its output, too, if it is one; a constant
    factor only scales others.
    """
    if node.op in ("mul", "div"):
        taken = node.inputs.get("input") if node.op == "div" else list(node.inputs.values())
        yield from (
            name
            for name in references(taken)
            if name not in constants or node.name in constants
        )
    elif node.op in _PRODUCTS_PLUS:
        yield from references(node.inputs.get("input"))
    elif node.row.kind == "passthrough" or node.op in _CARRIES or node.op in _MIRRORS:
        yield from node.refs()


def _ending(graph: Graph) -> set[str]:
    """Layers that nothing reads but what saturates, chooses or compares, directly or through
    sums, fills and moves.
    """
    ending: set[str] = set()
    for node in reversed(graph.nodes):
        read_by = graph.consumers[node.name]
        if read_by and all(
            name and _ends(graph.by_name[name], node.name, ending) for name in read_by
        ):
            ending.add(node.name)
    return ending


def _ends(reader: Node, value: str, ending: Set[str]) -> bool:
    """Whether of a value that is read nothing else is left, there or further on."""
    if reader.op in _ENDS or value in references(reader.inputs.get("attn_mask")):
        return True
    hands_on = reader.row.kind == "passthrough" or reader.op in (
        *_CARRIES,
        *_MIRRORS,
        *_PRODUCTS_PLUS,
    )
    return hands_on and reader.name in ending


def _fills_lowest(graph: Graph, node: Node) -> bool:
    """Whether the node writes very low constants, or holds them."""
    if node.op == "constant":
        far = _held(graph, node)
        return far is not None and far < 0
    if node.op == "mul":
        return any(abs(number) >= _FACTOR for number in _numbers(node))
    return node.op in _FILLS and any(number <= -FAR for number in _numbers(node))


def _numbers(node: Node) -> list[float]:
    """The numbers that the node is called with."""
    values = node.attrs.values()
    return [
        value for value in values if isinstance(value, (int, float)) and not math.isnan(value)
    ]


def _held(graph: Graph, node: Node) -> float | None:
    """What a constant or a trained tensor holds that may be a sentinel."""
    return far_value(graph.weight(node)) if node.is_float else None


def _is_mask_input(graph: Graph, node: Node) -> bool:
    """A floating-point value that is only added to attention scores before their softmax."""
    found = (
        list(readers(graph, node.name))
        if node.is_float and node.row.kind != "passthrough"
        else []
    )
    return bool(found) and all(
        name and _adds_to_scores(graph, graph.by_name[name], read, node) for name, read in found
    )


def _adds_to_scores(graph: Graph, reader: Node, read: str, value: Node) -> bool:
    if read in references(reader.inputs.get("attn_mask")):
        return True
    to_softmax = [name for name, _ in readers(graph, reader.name)]
    adds = reader.op == "add" and bool(to_softmax)
    return (
        value.op == "input"
        and adds
        and all(n and graph.by_name[n].op == "softmax" for n in to_softmax)
    )
