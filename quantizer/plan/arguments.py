"""Values of which a small error makes another value: angles, values that are rounded to
integers, and indices.
"""

from collections.abc import Iterator, Set

import torch

from quantizer.graph.ir import Graph, Node, references

# Their output consists of integers
_KERNELS = ("mac", "fusable")
# They have no quantization
_UNQUANTIZED = ("passthrough", "structural")


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
        reads = list(_uses(graph, node.name))
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


def _uses(graph: Graph, name: str) -> Iterator[tuple[str, str]]:
    """Yield (reader, what it reads) of a node's values, directly or through moves. A cast to
    integers is a reader, though integers are moved after it.
    """
    for reader in graph.consumers[name]:
        is_moved = reader and graph.by_name[reader].row.kind == "passthrough"
        if is_moved and not _is_cast_to_integers(graph.by_name[reader]):
            yield from _uses(graph, reader)
        else:
            yield reader, name


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
