"""Mask constants: values that stand for "not this one", as the lowest numbers, which a softmax
makes zero, and the highest. A model adds or inserts them to decide the result of a softmax, a
sigmoid or a maximum.
"""

import math
from collections.abc import Iterator, Set

from torch import Tensor

from quantizer.graph.ir import Graph, Node, readers, references

_LEAST_MAGNITUDE = 100.0
"""The smallest magnitude of such numbers: 100, 1e4, the largest of a dtype, infinity."""


# A factor that turns a mask of zeros and ones into such values
_MASK_FACTOR = 1e4
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
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "where",
    "masked_fill",
    "minimum",
    "cat",
    "stack",
    "slice_scatter",
    "select_scatter",
    "diagonal_scatter",
    "scatter",
    "masked_scatter",
    "index_put",
    "index_copy",
    "index_fill",
)
PRODUCTS_PLUS = ("addmm", "baddbmm")
"""Products to which the first argument is added."""
# Operators with a number, which count only if the number ends at one of the next
_FILLS_TOO = ("scatter", "pad", "index_put")
ORDERS = ("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal")
"""Operators that say which of two values is the larger one."""
_ENDS = (
    "sigmoid",
    "hardsigmoid",
    "log_sigmoid",
    "tanh",
    "softmax",
    "log_softmax",
    "exp",
    "logsumexp",
    "max",
    "min",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "topk",
    "sort",
    "argsort",
    "kthvalue",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    *ORDERS,
    "eq",
    "ne",
    "isinf",
    "isfinite",
    "isnan",
)
"""Operators that turn a mask constant into a value like others: they saturate, choose or
compare.
"""
_MIRRORS = ("neg", "abs")
# Of a mask's zeros
_LOGARITHMS = ("log", "log2", "log10", "special_logit")


def mask_constant_of(values: Tensor) -> float | None:
    """Return the least of `values` if that is -100 or below, else the greatest if that is 100
    or above, else None.

    >>> import torch
    >>> (
    ...     mask_constant_of(torch.tensor([-1e4, 300.0])),
    ...     mask_constant_of(torch.tensor([1.0, 100.0])),
    ...     mask_constant_of(torch.ones(2)),
    ... )
    (-10000.0, 100.0, None)
    """
    if values.numel() == 0:
        return None
    # torch does not compare floats of 8 bits
    if values.dtype.itemsize == 1:
        values = values.float()
    least, greatest = (float(end) for end in values.aminmax())
    if least <= -_LEAST_MAGNITUDE:
        return least
    return greatest if greatest >= _LEAST_MAGNITUDE else None


def masks(graph: Graph) -> Iterator[str]:
    """Yield layers whose values may be as low as a mask's, from where such values arise to the
    softmax that reads them.
    """
    low: set[str] = set()
    for node in graph.nodes:
        carried = () if node.op in _MIRRORS else _carried(node)
        is_source = _is_mask_input(graph, node) or _fills_lowest(graph, node)
        if is_source or not low.isdisjoint(carried):
            low.add(node.name)
            yield node.name


def chooses(node: Node) -> bool:
    """Return whether a node chooses among values, as a maximum does, so that mask constants
    are left behind.
    """
    return node.row.kind == "passthrough" and node.op in _ENDS


def mask_constants(graph: Graph, constants: Set[str]) -> Iterator[str]:
    """Yield layers whose values may be mask constants of either sign, all readers of which end
    them.

    That end distinguishes a mask constant from a constant that is large because pixels are:
    each reader saturates, chooses or compares. So few layers can be taken for one by mistake,
    and none that multiplies. `constants` are the layers whose values follow from constants.
    """
    ending = _ending(graph)
    far: set[str] = set()
    for node in graph.nodes:
        if node.op == "constant" or (node.op == "parameter" and node.name in ending):
            is_source = _mask_constant(graph, node) is not None
        else:
            is_logarithm = node.op in _LOGARITHMS and node.name in constants
            is_source = is_logarithm or _fills_constant(node)
        if is_source or not far.isdisjoint(_without_factors(node, constants)):
            far.add(node.name)
            if node.name in ending:
                yield node.name


def _fills_constant(node: Node) -> bool:
    """Return whether the node fills in a number that may be a mask constant."""
    if node.op not in (*_FILLS, *_FILLS_TOO):
        return False
    return any(abs(number) >= _LEAST_MAGNITUDE for number in _numbers(node))


def _carried(node: Node) -> tuple[str, ...]:
    """Return the inputs of the node whose mask constants are mask constants in its output."""
    if node.op in PRODUCTS_PLUS:
        return tuple(references(node.inputs.get("input")))
    carries = node.row.kind == "passthrough" or node.op in (*_CARRIES, *_MIRRORS)
    return tuple(node.refs()) if carries else ()


def _without_factors(node: Node, constants: Set[str]) -> tuple[str, ...]:
    """Return the inputs of `_carried` without divisors and constant factors, which only scale
    others.
    """
    if node.op not in ("mul", "div"):
        return _carried(node)
    factors = [node.inputs.get("input")] if node.op == "div" else [*node.inputs.values()]
    names = references(factors)
    return tuple(name for name in names if name not in constants or node.name in constants)


def _ending(graph: Graph) -> set[str]:
    """Return the layers of which every reader saturates, chooses or compares, directly or
    through sums, fills and moves.
    """
    ending: set[str] = set()
    for node in reversed(graph.nodes):
        names = graph.consumers[node.name]
        # "" is the network's output
        if not names or "" in names:
            continue
        if all(_ends(graph.by_name[name], node.name, ending) for name in names):
            ending.add(node.name)
    return ending


def _ends(reader: Node, value: str, ending: Set[str]) -> bool:
    """Return whether mask constants in a value end at a reader, or further on."""
    if reader.op in _ENDS or value in references(reader.inputs.get("attn_mask")):
        return True
    carries = reader.op in (*_CARRIES, *_MIRRORS, *PRODUCTS_PLUS)
    if reader.row.kind == "passthrough" or carries:
        return reader.name in ending
    return False


def _fills_lowest(graph: Graph, node: Node) -> bool:
    """Return whether the node writes or contains constants far below all values."""
    if node.op == "constant":
        far = _mask_constant(graph, node)
        return far is not None and far < 0
    if node.op == "mul":
        return any(abs(number) >= _MASK_FACTOR for number in _numbers(node))
    return node.op in _FILLS and any(number <= -_LEAST_MAGNITUDE for number in _numbers(node))


def _numbers(node: Node) -> list[float]:
    """Return the numbers that the node is called with."""
    numbers = []
    for value in node.attrs.values():
        if isinstance(value, (int, float)) and not math.isnan(value):
            numbers.append(value)
    return numbers


def _mask_constant(graph: Graph, node: Node) -> float | None:
    """Return a number in a constant or a trained tensor that may be a mask constant."""
    return mask_constant_of(graph.weight(node)) if node.is_float else None


def _is_mask_input(graph: Graph, node: Node) -> bool:
    """Return whether it is a floating-point value that is only added to attention scores before
    their softmax.
    """
    if not node.is_float or node.row.kind == "passthrough":
        return False
    reads = list(readers(graph, node.name))
    for reader, name in reads:
        if not reader or not _adds_to_scores(graph, graph.by_name[reader], name, node):
            return False
    return bool(reads)


def _adds_to_scores(graph: Graph, reader: Node, name: str, value: Node) -> bool:
    """Return whether a reader adds `value`, which it reads as `name`, to attention scores."""
    if name in references(reader.inputs.get("attn_mask")):
        return True
    if value.op != "input" or reader.op != "add":
        return False
    names = [reader_name for reader_name, _ in readers(graph, reader.name)]
    for softmax in names:
        if not softmax or graph.by_name[softmax].op != "softmax":
            return False
    return bool(names)
