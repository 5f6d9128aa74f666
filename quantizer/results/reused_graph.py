"""Whether a module still computes what the graph in a result folder says. Then the graph stands
for a new trace.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration.faithful import distance
from quantizer.graph.exported_program import STUBS
from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.names import Namer
from quantizer.graph.stored import StoredGraph, with_output
from quantizer.graph.targets import call as call_operator
from quantizer.graph.targets import resolve
from quantizer.seeding import seed_everything
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import left_alone

logger = logging.getLogger(__name__)

ROUNDINGS = 8
"""So many roundings to the output's dtype may two ways to compute it be apart."""
SAMPLES = 2
"""Samples that the module and the graph are compared on, where the batch is open."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
Shapes = dict[str, tuple[int, ...]]


class DifferentError(Exception):
    """The module computes something else than the graph, or the graph something else than it
    says.
    """


def reused_graph(
    stored: StoredGraph, constants: Mapping[str, Tensor], module: nn.Module, batch: Batch
) -> Graph | None:
    """Return the stored graph with the tensors of the module, if a trace of the module would
    give the same; None if that is not certain.

    The module has the classes that were traced, and gives the same values as the graph. Every
    node gives what the graph says: a tensor of its dtype, whose sizes follow the batch and the
    lengths where they are open.

    Returns None for a model whose weights stay in their files, which nobody runs twice.
    """
    graph = stored.bound(module, constants)
    if graph is None or graph.is_deferred:
        return None
    with torch.no_grad(), left_alone(module):
        try:
            _check_classes(graph, module)
            return _compared(graph, module, batch)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a module raises, a trace of it says it better
            logger.debug("the stored graph is not used: %s", error)
            return None


def _check_classes(graph: Graph, module: nn.Module) -> None:
    """Raise an error if a node was traced in a module of another class."""
    namer = Namer(module)
    if namer.model != graph.model:
        raise DifferentError(f"the model is {namer.model}")
    for node in graph.nodes:
        if node.classes and namer.classes(node.scope) != node.classes:
            raise DifferentError(f"{node.name} is in another module")


def _compared(graph: Graph, module: nn.Module, batch: Batch) -> Graph:
    """Return the graph with the output type of the module, if both compute the same."""
    call = partial(_small_call, graph, batch)
    shapes, leaves = _run(graph, call(SAMPLES, other_lengths=False))
    args, kwargs = call(SAMPLES, other_lengths=False)
    seed_everything(0)
    with _without_fast_paths():
        returned = module(*args, **kwargs)
    expected, structure = pytree.tree_flatten(returned)
    if len(expected) != len(leaves) or not all(map(_is_same, expected, leaves)):
        raise DifferentError("the outputs differ")
    larger = other = shapes
    if any(node.shape and node.shape[0] is None for node in _inputs(graph)):
        larger, _ = _run(graph, call(SAMPLES + 1, other_lengths=False))
    if graph.lengths:
        other, _ = _run(graph, call(SAMPLES, other_lengths=True))
    for node in graph.nodes:
        if node.shape is not None:
            name = node.name
            _check_sizes(node, shapes[name], larger=larger[name], other=other[name])
    return with_output(graph, graph.output, structure)


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "input"]


def _run(graph: Graph, call: Call) -> tuple[Shapes, list[Any]]:
    """Return the shape of each node's tensor and the leaves of the output.

    The operators are those of the trace, not the layers that stand for them, which may add in
    another order.
    """
    shapes: Shapes = {}
    values = _input_values(graph, call)
    unread = Counter(references(graph.output))
    for node in graph.nodes:
        unread.update(node.refs())
    seed_everything(0)
    for node in graph.nodes:
        if node.op != "input":
            values[node.name] = _value(graph, node, values)
        _note(shapes, node, values[node.name])
        for name in node.refs():
            unread[name] -= 1
            if not unread[name]:
                del values[name]
    output: list[Any] = map_refs(graph.output, values.__getitem__)
    return shapes, output


def _input_values(graph: Graph, call: Call) -> dict[str, Any]:
    names = [node.name for node in _inputs(graph)]
    return dict(zip(names, pytree.tree_leaves(call), strict=True))


def _value(graph: Graph, node: Node, values: Mapping[str, Any]) -> Any:
    """Return what a node computes of the values before it."""
    tensors: dict[str, Any] = {}
    for name, path in node.params.items():
        tensors[name] = graph.tensors[path]
    if node.op in ("parameter", "constant"):
        return graph.weight(node)
    arguments = map_refs({**node.inputs, **node.attrs}, values.__getitem__)
    if node.op in STUBS.values():
        return arguments["input"]
    if "params" in _argument_names(node.target):
        tensors = {"params": list(tensors.values())}
    return call_operator(node.target, {**arguments, **tensors})


def _argument_names(target: str) -> list[str]:
    schema: Any = getattr(resolve(target), "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def _note(shapes: Shapes, node: Node, value: Any) -> None:
    """Note the shape of a value; raise an error if the node says another kind of value."""
    if not isinstance(value, Tensor):
        is_other = node.op == "input" and not _is_same(node.attrs.get("value"), value)
        if node.shape is not None or is_other:
            raise DifferentError(f"{node.name} gives another value")
        return
    if node.shape is None or len(node.shape) != value.dim() or node.dtype != value.dtype:
        raise DifferentError(f"{node.name} gives another kind of tensor")
    for axis, size in enumerate(node.shape):
        is_open = size is None or axis in node.open_axes
        if not is_open and size != value.shape[axis]:
            raise DifferentError(f"{node.name} gives another shape")
    shapes[node.name] = tuple(value.shape)


def _check_sizes(
    node: Node, shape: tuple[int, ...], *, larger: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Raise an error if sizes follow the batch or the lengths, and the node does not say so."""
    assert node.shape is not None
    for axis, size in enumerate(node.shape):
        follows_batch = shape[axis] != larger[axis]
        follows_length = shape[axis] != other[axis]
        if size is not None and size != shape[axis]:
            raise DifferentError(f"{node.name} gives another shape")
        if follows_batch != (size is None):
            raise DifferentError(f"{node.name} follows the batch elsewhere")
        if size is not None and follows_length and axis not in node.open_axes:
            raise DifferentError(f"{node.name} follows a length elsewhere")


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two outputs are equal but for the rounding of a few additions, which may
    be in another order.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and repr(one) == repr(other)
    if one.dtype != other.dtype:
        return False
    is_rounded = one.is_floating_point() or one.is_complex()
    largest = ROUNDINGS * torch.finfo(one.dtype).eps if is_rounded else 0.0
    return distance([one], [other]) <= largest


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Have attention compute as it is traced, and not in one kernel of its own."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def _small_call(graph: Graph, batch: Batch, samples: int, *, other_lengths: bool) -> Call:
    """Return a call of so many samples, where the batch is open, of tensors that nobody else
    has; lengths are those of the batch, or others.
    """
    call = (batch.args, dict(batch.kwargs))
    located, structure = pytree.tree_flatten_with_path(call)
    paths, leaves = [], []
    for path, leaf in located:
        paths.append(tuple(map(_key, path)))
        leaves.append(leaf)
    if tuple(paths) != graph.input_paths:
        raise DifferentError("the call has other arguments")
    for index, (node, leaf) in enumerate(zip(_inputs(graph), leaves, strict=True)):
        if not isinstance(leaf, Tensor):
            continue
        if node.shape and node.shape[0] is None:
            copies = -(-samples // len(leaf))
            leaf = torch.cat([leaf[:samples]] * copies)[:samples]
        leaves[index] = leaf.clone()
    for length in graph.lengths if other_lengths else ():
        for index, axis in length.axes:
            leaves[index] = _of_other_length(leaves[index], axis, length.least)
    small: Call = pytree.tree_unflatten(leaves, structure)
    return small


def _key(entry: Any) -> Any:
    """Return the index, key or name of an entry of a path, as traces have it."""
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return None


def _of_other_length(tensor: Tensor, axis: int, least: int) -> Tensor:
    """Return the tensor shorter by one, or longer where it is as short as it can be."""
    size = tensor.shape[axis]
    if size > least:
        return tensor.narrow(axis, 0, size - 1).clone()
    return torch.cat([tensor, tensor.narrow(axis, size - 1, 1)], axis)
