"""Reuse the graph in a result folder instead of a new trace, if it is certain that the module
still computes the same.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration.faithful import output_distance
from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.names import Namer
from quantizer.graph.program_nodes import STUB_OPERATORS
from quantizer.graph.stored import StoredGraph, short_class, with_output
from quantizer.graph.targets import call as call_operator
from quantizer.graph.targets import resolve_target
from quantizer.results.small_calls import Call, DifferentError, SmallCalls, check_kind
from quantizer.results.unchanged_code import bind_unchanged
from quantizer.seeding import seed_everything
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import preserve_module_state

_logger = logging.getLogger(__name__)

_ROUNDINGS = 8
"""By how many roundings to their dtype the outputs of module and graph may differ. Both add the
same numbers, perhaps in another order.
"""
_SAMPLES = 2
"""The number of samples that module and graph are compared on, if the batch size is not fixed.
"""


def reused_graph(
    stored: StoredGraph,
    constants: Mapping[str, Tensor],
    module: nn.Module,
    batch: Batch,
) -> Graph | None:
    """Return the stored graph with the tensors of the module, or None if it is not certain that
    a trace of the module would give the same graph.

    It is certain if four conditions hold. The submodules have the classes that were traced. The
    module and the graph give the same outputs. Every node gives a tensor of the dtype and shape
    in the graph. Its sizes follow the batch size and the input lengths where the graph says so.

    A model whose weights stay in files does not run. Its code and its config must be those that
    were traced.
    """
    graph = stored.bound(module, constants)
    if graph is None:
        return None
    with torch.no_grad(), preserve_module_state(module):
        try:
            graph = _with_classes(graph, module)
            if graph.is_deferred:
                return bind_unchanged(graph, module, batch)
            return _verify_graph(graph, module, batch)
        except KeyboardInterrupt:
            raise
        # Code of the user's may raise anything. A trace of it gives a better message
        except BaseException as error:  # noqa: BLE001
            _logger.debug("the stored graph is not used: %s", error)
            return None


def _with_classes(graph: Graph, module: nn.Module) -> Graph:
    """Return the graph with the full class names of the modules instead of short ones.

    Raises:
        DifferentError: a node was traced in a module of another class.
    """
    namer = Namer(module)
    if namer.model != graph.model:
        raise DifferentError(f"the model is {namer.model}")
    nodes: list[Node] = []
    for node in graph.nodes:
        classes = node.classes
        if classes:
            classes = namer.classes(node.scope)
        if tuple(map(short_class, classes)) != node.classes:
            raise DifferentError(f"{node.name} is in another module")
        nodes.append(replace(node, classes=classes))
    return graph.replaced(nodes=tuple(nodes))


def _verify_graph(graph: Graph, module: nn.Module, batch: Batch) -> Graph:
    """Return the graph with the output type of the module, after checking that both compute the
    same.

    Raises:
        DifferentError: they do not.
    """
    calls = SmallCalls(graph, batch)
    samples = _SAMPLES
    if graph.lengths:
        # Several samples are compared at another length, which costs less
        samples = 1
    whole, structure = _alike(graph, module, calls, samples)
    several = whole
    if graph.lengths:
        several, _ = _alike(graph, module, calls, _SAMPLES, at_other_lengths=True)
    fewer = several
    if calls.are_open:
        call = calls.of(_SAMPLES - 1, at_other_lengths=bool(graph.lengths))
        fewer = _Run(graph, call)
    for node in graph.nodes:
        if node.shape is not None:
            whole.check_sizes(node, several, fewer)
    return with_output(graph, graph.output, structure)


def _alike(
    graph: Graph,
    module: nn.Module,
    calls: "SmallCalls",
    samples: int,
    *,
    at_other_lengths: bool = False,
) -> tuple["_Run", Any]:
    """Return a run of the graph and the structure of what the module returns for that call;
    raise an error if both return something else.
    """
    run = _Run(graph, calls.of(samples, at_other_lengths=at_other_lengths))
    args, kwargs = calls.of(samples, at_other_lengths=at_other_lengths)
    seed_everything(0)
    with _without_fast_paths():
        returned = module(*args, **kwargs)
    expected, structure = pytree.tree_flatten(returned)
    _check_outputs(expected, run.leaves)
    return run, structure


def _check_outputs(expected: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Check that the graph returns what the module returns.

    Raises:
        DifferentError: it does not.
    """
    if len(expected) != len(leaves):
        raise DifferentError("the module returns more or less")
    for value, leaf in zip(expected, leaves, strict=True):
        if not _are_nearly_equal(value, leaf):
            raise DifferentError("the outputs differ")


class _Run:
    """The results of running the operators of a graph.

    The traced operators run, and not the layers of `Network`, which may add numbers in another
    order.

    Attributes:
        shapes: the shape of the tensor that each node gives.
        leaves: the output, flattened.

    Raises:
        DifferentError: a node gives another dtype or shape than the graph says.
    """

    def __init__(self, graph: Graph, call: Call) -> None:
        self._graph = graph
        # Other lengths of texts may have other scales, so they are traced
        self._takes_any_size = any(length.is_asked_for for length in graph.lengths)
        self._values: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        inputs: list[str] = []
        for node in graph.nodes:
            if node.op == "input":
                inputs.append(node.name)
        arguments = pytree.tree_leaves(call)
        self._values.update(zip(inputs, arguments, strict=True))
        unread = Counter(references(graph.output))
        for node in graph.nodes:
            unread.update(node.refs())
        seed_everything(0)
        for node in graph.nodes:
            self._run(node)
            for name in node.refs():
                unread[name] -= 1
                if unread[name] == 0:
                    del self._values[name]
        self.leaves: list[Any] = self._read(graph.output)

    def _read(self, value: Any) -> Any:
        """Return a nested value with the results of nodes instead of references to them."""
        return map_refs(value, self._values.__getitem__)

    def _run(self, node: Node) -> None:
        """Run a node, and store its result and its shape.

        Raises:
            DifferentError: it gives another dtype or shape than the graph says.
        """
        if node.op != "input":
            self._values[node.name] = self._value(node)
        value = self._values[node.name]
        if isinstance(value, Tensor):
            check_kind(node, value)
            self.shapes[node.name] = tuple(value.shape)
            return
        if node.shape is not None:
            raise DifferentError(f"{node.name} gives no tensor")
        if node.op != "input":
            return
        if not _are_nearly_equal(value, node.attrs["value"]):
            raise DifferentError(f"{node.name} is another value")

    def _value(self, node: Node) -> Any:
        """Return the result of a node."""
        if node.op in ("parameter", "constant"):
            return self._graph.weight(node)
        arguments = self._read(node.inputs)
        if node.op in STUB_OPERATORS.values():
            return arguments["input"]
        arguments.update(node.attrs)
        tensors = self._graph.tensors
        if _takes_list_of_parameters(node.target):
            paths = node.params.values()
            arguments["params"] = [tensors[path] for path in paths]
        else:
            for name, path in node.params.items():
                arguments[name] = tensors[path]
        return call_operator(node.target, arguments)

    def check_sizes(self, node: Node, several: "_Run", fewer: "_Run") -> None:
        """Check that exactly those sizes of a node follow the batch size and the input lengths
        of which the graph says so.

        Args:
            node: a node that gives a tensor.
            several: a run of several samples, of other lengths than this one if lengths are
                open.
            fewer: the same run with one sample less.

        Raises:
            DifferentError: another size does, or one of these does not.
        """
        name = node.name
        shape = self.shapes[name]
        several_shape = several.shapes[name]
        fewer_shape = fewer.shapes[name]
        for axis, size in enumerate(node.shape or ()):
            is_batch = size is None
            is_open = is_batch or axis in node.open_axes
            is_any_size = is_batch or (is_open and self._takes_any_size)
            if not is_any_size and size != shape[axis]:
                raise DifferentError(f"{name} gives another shape")
            follows_batch = fewer_shape[axis] != several_shape[axis]
            if follows_batch != is_batch:
                raise DifferentError(f"{name} follows the batch elsewhere")
            if is_open:
                continue
            follows_length = several_shape[axis] != shape[axis]
            if follows_length:
                raise DifferentError(f"{name} follows a length elsewhere")


@cache
def _takes_list_of_parameters(target: str) -> bool:
    """Return whether an operator takes all parameters of a recurrent layer as one list."""
    schema: Any = getattr(resolve_target(target), "_schema", None)
    if schema is None:
        return False
    return any(argument.name == "params" for argument in schema.arguments)


def _are_nearly_equal(one: Any, other: Any) -> bool:
    """Return whether two outputs are equal, or differ only as if numbers were added in another
    order.
    """
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    if not are_tensors:
        # In contrast to ==, this holds for two numbers that are NaN
        return repr(one) == repr(other)
    if one.dtype != other.dtype:
        return False
    tolerance = 0.0
    if one.is_floating_point():
        tolerance = _ROUNDINGS * torch.finfo(one.dtype).eps
    return output_distance([one], [other]) <= tolerance


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Disable torch's fused kernel for attention, which traces do not contain, inside the
    `with` block.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
