"""Values of which a small error makes another value: angles, what is rounded to integers,
places that are read.
"""

from collections.abc import Iterator, Set

import torch

from quantizer.graph.ir import Graph, Node, references

_KERNELS = ("mac", "fusable")  # what makes integers
_UNQUANTIZED = ("passthrough", "structural")  # what has no quantization of its own


def arguments(graph: Graph, constants: Set[str]) -> Set[str]:
    """Return the layers that make arguments of sines, of what rounds to integers, and of what
    reads at places.

    These are found backwards. Other readers quantize what they make of such a value, and a
    layer that multiplies it quantizes its own input. What kernels of integers make, as a layer
    with weights, is no such value where it is returned as well.
    """
    alone: set[str] = set()
    shared: set[str] = set()
    for node in reversed(graph.nodes):
        may_be = node.row.kind != "structural" or node.op in ("input", "parameter")
        if not may_be or node.name in constants or not _has_fractions(node):
            continue
        read_by = list(_uses(graph, node.name))
        may_share = node.op == "input" or node.row.kind not in (*_KERNELS, *_UNQUANTIZED)
        if node.row.kind in _KERNELS:
            may_share = all(reader for reader, _ in read_by)
        if read_by and all(_is_argument(graph, reader, alone, constants) for reader in read_by):
            alone.add(node.name)
        elif may_share and any(
            _is_argument(graph, reader, alone | shared, constants) for reader in read_by
        ):
            shared.add(node.name)
    return alone | shared


def _uses(graph: Graph, name: str) -> Iterator[tuple[str, str]]:
    """The `readers` of a node's values; a cast to integers, after which they are moved as
    integers, is one.
    """
    for reader in graph.consumers[name]:
        is_moved = reader and graph.by_name[reader].row.kind == "passthrough"
        if is_moved and not _is_cast_to_integers(graph.by_name[reader]):
            yield from _uses(graph, reader)
        else:
            yield reader, name


def _is_argument(
    graph: Graph, reading: tuple[str, str], arguments: Set[str], constants: Set[str]
) -> bool:
    """Whether a reader takes a value as an argument, or makes arguments of it and of
    constants.
    """
    name, value = reading
    if not name:
        return False
    reader = graph.by_name[name]
    if _is_cast_to_integers(reader):
        return True
    if any(value in references(reader.inputs.get(key)) for key in _exact_inputs(reader)):
        return True
    if name not in arguments or reader.row.weight:
        return False
    others = list(reader.refs())
    others.remove(value)
    return reader.row.kind != "mac" or constants >= set(others)


def _exact_inputs(node: Node) -> tuple[str, ...]:
    """The arguments that its operator wants exact, which some do for some settings."""
    if node.op == "div" and node.attrs.get("rounding_mode"):
        return ("input", "other")
    if node.op == "exp" and node.dtype is not None and node.dtype.is_complex:
        return ("input",)  # a cosine and a sine
    return node.row.exact


def _has_fractions(node: Node) -> bool:
    """Whether the node makes one tensor of floating-point or complex numbers."""
    return node.dtype is not None and (node.dtype.is_floating_point or node.dtype.is_complex)


def _is_cast_to_integers(node: Node) -> bool:
    """Whether a node makes integers of what it reads; truth values are comparisons."""
    return node.op == "to" and node.dtype != torch.bool and not _has_fractions(node)
