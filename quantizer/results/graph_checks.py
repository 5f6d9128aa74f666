"""Check the graph in a result folder before any of its operators runs: anybody may have written
the file. A graph that tracing cannot produce is refused.
"""

import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizer.calibration import fingerprint
from quantizer.graph.ir import Graph, Node, references
from quantizer.graph.ops import OPS, find_op
from quantizer.graph.program_nodes import MARK, STUB_OPERATORS
from quantizer.graph.stored import StoredGraph
from quantizer.graph.targets import packet, refine, resolve_target
from quantizer.storage.files import damaged

MAX_VALUES = 1 << 31
"""The most values that a tensor of a stored graph may have."""
_TOO_MANY = f"it asks for more than {MAX_VALUES} values"
_WITHOUT_OPERATOR = ("input", "parameter", "constant")
_ARITHMETIC = frozenset(
    function.__name__
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
        *(operator.mod, operator.pow, operator.neg, operator.pos, operator.abs),
        *(operator.and_, operator.or_, operator.xor, operator.not_, operator.invert),
        *(operator.lshift, operator.rshift, operator.eq, operator.ne, operator.lt),
        *(operator.le, operator.gt, operator.ge, operator.getitem),
    )
)
"""The functions of Python's `operator` that traced graphs use to compute sizes. Others, such as
`operator.methodcaller`, could run any code.
"""
_SIZES = ("size", "output_size", "repeats", "dims", "shape", "pad")
"""Names of arguments that determine the size of an operator's result."""
_BOUNDS = ("start", "end", "steps", "n", "m", "row", "col")
"""Names of further such arguments of operators without inputs, such as `arange`."""

Fault = tuple[str, str]
"""A place in graph.json, and what is wrong there."""


def check_graph(stored: StoredGraph, header: Mapping[str, Any], path: Path) -> None:
    """Check that tracing can have written a graph, and that it is the graph of this
    calibration.

    Args:
        stored: the graph.
        header: of quant_info.json.
        path: the file of the graph, for errors.

    Raises:
        ResultError: it is not. The file, the place in it and the reason are named.
    """
    for faults in (
        _faults_of_header(stored, header),
        _faults_of_nodes(stored),
        _faults_of_inputs(stored.graph),
        _faults_of_sizes(stored),
    ):
        for place, why in faults:
            raise damaged(path, place, why)


def operator_fault(node: Node) -> str | None:
    """Return why tracing cannot have written the operator of a node, or None if it can."""
    expected = node.op
    if node.op in STUB_OPERATORS.values():
        expected = MARK
    elif node.op not in _WITHOUT_OPERATOR:
        if not _is_allowed(node.target):
            return f"{node.target!r} is not an operator that a stored graph may have"
        row = find_op(packet(node.target))
        name = refine(row.name, {**node.inputs, **node.attrs})
        return None if node.op == name else f"{node.op!r} is not the operator {name!r}"
    if node.target == expected:
        return None
    return f"{node.target!r} is not {expected!r}"


def _is_allowed(target: str) -> bool:
    """Return whether a target is arithmetic with sizes or an operator without side effects."""
    namespace, _, name = target.partition(".")
    if namespace == "operator":
        return name in _ARITHMETIC
    if "." not in name:
        return _is_resolved(target)
    row = find_op(packet(target))
    if row.name in OPS:
        return True
    return namespace == "aten" and _has_no_side_effects(target)


def _is_resolved(target: str) -> bool:
    """Return whether torch has this operator."""
    try:
        resolve_target(target)
    except ValueError:
        return False
    return True


def _has_no_side_effects(target: str) -> bool:
    """Return whether an operator that is not in the table only computes: it takes no text, such
    as the name of a file, and changes none of its arguments.
    """
    try:
        schema: Any = getattr(resolve_target(target), "_schema", None)
    except (AttributeError, ValueError):
        return False
    if schema is None or schema.is_mutable:
        return False
    for argument in schema.arguments:
        kind = str(argument.type)
        # "t" is a type variable, which stands for any type
        if "str" in kind or "Any" in kind or kind == "t":
            return False
    return True


def _faults_of_header(stored: StoredGraph, header: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the differences between a graph and quant_info.json."""
    graph = stored.graph
    if graph.model != header["model"]:
        yield "model", f"it is {graph.model!r}, not {header['model']!r}"
    layer = fingerprint.first_difference(header["layers"], fingerprint.layer_digests(graph))
    if layer is not None:
        yield "nodes", f"{layer} is not the layer that was calibrated"
    if stored.tensors.keys() != header["weights"].keys():
        yield "tensors", "it has other tensors than quant_info.json"
    if fingerprint.input_shapes(graph) != header["inputs"]:
        yield "nodes", "its inputs have other shapes than in quant_info.json"
    if not set(stored.graph.constants) <= stored.tensors.keys():
        yield "constants", "there are no such tensors"


def _faults_of_nodes(stored: StoredGraph) -> Iterator[Fault]:
    """Yield the faults of nodes, such as reading a node that comes later."""
    known: set[str] = set()
    for index, node in enumerate(stored.graph.nodes):
        place = f"nodes/{index}"
        why = operator_fault(node)
        if why is not None:
            yield f"{place}/target", why
        if node.name in known:
            yield f"{place}/name", f"there are two nodes {node.name!r}"
        if not known.issuperset(node.refs()):
            yield f"{place}/inputs", "it reads a node that is not before it"
        if any(references(node.attrs)):
            yield f"{place}/attrs", "it holds a reference"
        if not stored.tensors.keys() >= set(node.params.values()):
            yield f"{place}/params", "there is no such tensor"
        if (node.shape is None) != (node.dtype is None):
            yield place, "it has a shape or a dtype alone"
        known.add(node.name)
    if not known.issuperset(references(stored.graph.output)):
        yield "output", "it names a node that is not there"


def _faults_of_inputs(graph: Graph) -> Iterator[Fault]:
    """Yield the faults of the inputs of a graph, and of their lengths that may vary."""
    inputs = [node for node in graph.nodes if node.op == "input"]
    numbers = [node.attrs.get("index") for node in inputs]
    if numbers != list(range(len(inputs))):
        yield "nodes", "its inputs are not counted from 0"
    if len(inputs) != len(graph.input_paths):
        yield "inputs", f"it names {len(graph.input_paths)} of {len(inputs)} inputs"
    for path in graph.input_paths:
        if len(path) < 2 or path[0] not in (0, 1):
            yield "inputs", f"{list(path)} is not a place in a call"
    for node in inputs:
        if node.shape is None and "value" not in node.attrs:
            yield "nodes", f"{node.name} has neither a shape nor a value"
    for number, length in enumerate(graph.lengths):
        place = f"lengths/{number}"
        if length.least < 1 or length.traced not in length:
            yield place, "its bounds do not hold what was traced"
        for index, axis in length.axes:
            is_open = index < len(inputs) and axis in inputs[index].open_axes
            if not is_open:
                yield place, f"axis {axis} of input {index} is not open"


def _faults_of_sizes(stored: StoredGraph) -> Iterator[Fault]:
    """Yield shapes and arguments that would take more memory than any network needs."""
    for path, kind in stored.tensors.items():
        if math.prod(kind.shape) > MAX_VALUES:
            yield f"tensors/{path}", _TOO_MANY
    for index, node in enumerate(stored.graph.nodes):
        place = f"nodes/{index}"
        shape = node.shape or ()
        if _product(shape) > MAX_VALUES:
            yield f"{place}/shape", _TOO_MANY
        for axis in node.open_axes:
            if axis >= len(shape) or shape[axis] is None:
                yield f"{place}/open_axes", f"there is no such size {axis}"
        for name, value in node.attrs.items():
            is_size = name in _SIZES
            if not node.inputs:
                is_size = name in (*_SIZES, *_BOUNDS)
            if is_size and _product(value) > MAX_VALUES:
                yield f"{place}/attrs/{name}", _TOO_MANY


def _product(sizes: Any) -> float:
    """Return the product of the sizes in an argument or a shape. Sizes below 1 count as 1, and
    negative ones, which are relative, by their magnitude.
    """
    if not isinstance(sizes, (list, tuple)):
        sizes = [sizes]
    product: float = 1
    for size in sizes:
        if isinstance(size, (int, float)) and product <= MAX_VALUES:
            product *= max(1, abs(size))
    return product
