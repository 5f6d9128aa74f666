"""A module that runs a graph node by node, and one forward pass of it over one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantizer.nn as layers
from quantizer.config.wording import counted
from quantizer.errors import BatchError, DataError, first_line
from quantizer.graph.emit import describe, overwritten
from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.tracing.lengths import Length
from quantizer.nn.layer import Layer, channels_first
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.recorded_outputs import RecordedOutputs
from quantizer.storage.deferred_tensor import CPU, DeferredTensor

_IMAGE_RANK = 4
"""Axes of a batch of images."""


class Network(nn.Module):
    """A module with one layer per node of a graph, called as the model that was traced.

    `layers` has them by name, and `module_names` their names in the generated code and in
    `state_dict`. `last_uses` names for each node the values that no later node reads,
    `overwritten` the nodes whose values their reader overwrites. A call whose output is in
    `recorded` returns that one.
    """

    recorded: RecordedOutputs | None = None

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.layers: dict[str, Layer] = {}
        self.module_names: dict[str, str] = {}
        self.last_uses: Mapping[str, Sequence[str]] = _last_uses(graph)
        sources = [overwritten(graph, node) for node in graph.nodes]
        self.overwritten: Collection[str] = frozenset(filter(None, sources))
        for index, node in enumerate(graph.nodes):
            layer = build_layer(graph, node)
            self.layers[node.name] = layer
            self.module_names[node.name] = f"module_{index}"
            self.add_module(f"module_{index}", layer)
        # The next layer with weights, which are read from disk meanwhile
        self._next_weighted: dict[str, str] = {}
        if graph.is_deferred:
            weighted = [node.name for node in graph.nodes if node.params]
            self._next_weighted = dict(pairwise(weighted))
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the traced model, in the type of its outputs."""
        if self.recorded is None:
            return self.observe(args, kwargs, NO_WATCHERS)
        inputs = self.inputs(args, kwargs)
        return self.recorded.output(inputs, lambda: Execution(self, inputs).advance().output())

    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Watchers) -> Any:
        """Run, show each watched node's value to its watcher, and return the output."""
        return self.start(args, kwargs).advance(watch=watch).output()

    def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Execution:
        """Return an execution of this call, before its first node.

        Raises:
            DataError: the call is not shaped like the example the model was traced with.
        """
        return Execution(self, self.inputs(args, kwargs))

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """Run the node's layer on the values that it reads.

        Raises:
            DataError: torch refuses them. Tracing accepted the first batch, so it is this one.
        """
        if node.name in self._next_weighted:
            _prefetch(self.layers[self._next_weighted[node.name]])
        try:
            return self.layers[node.name](**layer_arguments(node, values))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = first_line(error)
            raise DataError(
                f"{node.name} cannot run on this input: {reason}",
                help="check shapes, dtypes and values of the data",
            ) from error

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the network's inputs in a call.

        Raises:
            DataError: the call is not shaped like the example the model was traced with.
        """
        return inputs_of(self.graph, args, kwargs)

    def quantizers(self) -> Iterator[tuple[str, str, TensorQuantizer]]:
        """Yield layer name, role and quantizer for all that are attached."""
        for name, layer in self.layers.items():
            for role, quantizer in layer.quantizers.items():
                yield name, role, cast(TensorQuantizer, quantizer)


def build_layer(graph: Graph, node: Node) -> Layer:
    """Return the node's layer with its parameters from the graph. It shares their memory until
    they are quantized.
    """
    call = describe(graph, node)
    layer: Layer = getattr(layers, call.cls)(*call.args, **call.kwargs)
    for key, path in node.params.items():
        value = graph.tensors[path]
        if key not in layer._buffers:
            value = nn.Parameter(value, requires_grad=False)
        setattr(layer, key, value)
    return layer.eval()


def inputs_of(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of a graph in a call.

    Raises:
        DataError: the call is not shaped like the example the model was traced with.
    """
    nodes = [node for node in graph.nodes if node.op == "input"]
    lengths = _names_of_lengths(graph)
    values: list[Any] = []
    batches: dict[str, int] = {}
    for index, (node, path) in enumerate(zip(nodes, graph.input_paths, strict=True)):
        value = _argument(node, path, args, kwargs)
        _check_input(node, value, lengths.get(index, {}))
        values.append(value)
        if node.shape and None in node.shape:
            batches[node.name] = value.shape[node.shape.index(None)]
    count = len(pytree.tree_leaves((args, dict(kwargs))))
    if count != len(values):
        raise DataError(
            f"{graph.model} was traced with {counted(len(values), 'input')}, but this "
            f"call has {count}",
            help="give the inputs of the call that was traced, and no others",
        )
    if _differ(batches):
        raise DataError(f"the inputs have batches of different sizes: {batches}")
    for length in graph.lengths:
        sizes: dict[str, int] = {}
        for index, axis in length.axes:
            name = nodes[index].name
            if name in sizes:
                name = f"axis {axis} of {name}"
            sizes[name] = values[index].shape[axis]
        _check_length(length, sizes)
    return values


def _argument(
    node: Node, path: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the argument of a call for an input node.

    Raises:
        DataError: the call has no such argument.
    """
    value: Any = (args, kwargs)
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        where = "kwargs" if path[0] else "args"
        for key in path[1:]:
            where += f"[{key!r}]"
        raise DataError(f"{node.name} is missing: no {where} in this call") from None
    return value


def _prefetch(layer: Layer) -> None:
    """Read a layer's weights while a device computes the layers before. The CPU has no time to
    spare.
    """
    for tensor in deferred_tensors(layer):
        if tensor.device != CPU:
            tensor.prefetch()


def deferred_tensors(layer: nn.Module) -> list[DeferredTensor]:
    """Return the parameters and buffers of a layer that are in files."""
    tensors = (*layer.parameters(), *layer.buffers())
    return [tensor for tensor in tensors if isinstance(tensor, DeferredTensor)]


def _names_of_lengths(graph: Graph) -> dict[int, dict[int, str]]:
    """Return the names of the lengths that a call chooses, by input and axis."""
    names: dict[int, dict[int, str]] = {}
    for length in graph.lengths:
        for index, axis in length.axes:
            names.setdefault(index, {})[axis] = length.name
    return names


def _check_input(node: Node, value: Any, lengths: Mapping[int, str]) -> None:
    """Raise `DataError` if shape and dtype are not as traced, except for the batch and
    `lengths` (names by axis). A number is part of the program, so it must be the traced one.

    A dynamic size is not compared: in an export, a comparison would fix it.
    """
    if node.shape is None:
        traced = node.attrs["value"]
        if type(value) is not type(traced) or value != traced:
            raise DataError(
                f"{node.name}: the model was traced with {traced!r} here, got {value!r}"
            )
        return
    if not isinstance(value, Tensor):
        raise DataError(f"{node.name}: expected a tensor, got {type(value).__name__}")
    fits = value.dtype == node.dtype and value.dim() == len(node.shape)
    expected = []
    for axis, size in enumerate(node.shape):
        if size is None:
            expected.append("b")
        elif axis in lengths:
            expected.append(lengths[axis])
        else:
            expected.append(str(size))
            fits = fits and value.shape[axis] == size
    if not fits:
        remedy = "all batches need the shape and dtype of the first one"
        if "b" in expected:
            remedy += "; b is their size"
        elif value.dim() == node.rank and list(value.shape[1:]) == list(node.shape[1:]):
            remedy += ": leave out a last one that is smaller, as drop_last=True does"
        # Only its height or width may be another
        is_alike = value.dtype == node.dtype and value.shape[1:2] == node.shape[1:2]
        if is_alike and node.is_float and node.rank == value.dim() == _IMAGE_RANK:
            remedy += "; the option dynamic leaves height and width open, if the model does"
        raise BatchError(
            f"{node.name}: expected [{', '.join(expected)}] {node.dtype}, got "
            f"{list(value.shape)} {value.dtype}",
            help=remedy,
        )


def _differ(sizes: Mapping[str, int]) -> bool:
    """Return whether any size differs from the first. In an export the sizes are symbols, and
    the comparison makes them equal.
    """
    first = next(iter(sizes.values()), None)
    return any(size != first for size in sizes.values())


def _check_length(length: Length, sizes: Mapping[str, int]) -> None:
    """Raise `DataError` if the inputs differ in a size, or the model does not accept it."""
    if _differ(sizes):
        kind = f"a different {length.noun} each"
        if not length.is_asked_for:
            kind = "sequences of different lengths"
        raise DataError(f"the inputs have {kind}: {dict(sizes)}")
    for name, size in sizes.items():
        if size not in length:
            kind = f"a {length.noun}" if length.is_asked_for else "sequences"
            raise DataError(f"{name}: the model takes {kind} of {length}, got one of {size}")


def _last_uses(graph: Graph) -> dict[str, list[str]]:
    """Return for each node the values that no later node reads."""
    outputs = set(references(graph.output))
    last_readers: dict[str, str] = {}
    last_uses: dict[str, list[str]] = {}
    for node in graph.nodes:
        last_uses[node.name] = []
        last_readers[node.name] = node.name
        for name in node.refs():
            last_readers[name] = node.name
    for name, reader in last_readers.items():
        if name not in outputs:
            last_uses[reader].append(name)
    return last_uses


Watchers = Mapping[str, Callable[[Tensor], None]]
"""Functions that are called with the value of a node, by the node's name."""
NO_WATCHERS: Watchers = {}


class Runnable(Protocol):
    """A network that is executed node by node; see `Network`."""

    graph: Graph
    last_uses: Mapping[str, Sequence[str]]
    overwritten: Collection[str]

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """Return the node's value. `values` has those of the nodes that it reads, and that of
        the node itself if it is an input.
        """


class Execution:
    """The values that are alive between two nodes. `position` is the next node's index.

    Args:
        network: the network that runs.
        inputs: its inputs for the batch, in order.
    """

    def __init__(self, network: Runnable, inputs: Sequence[Any]) -> None:
        names = [node.name for node in network.graph.nodes if node.op == "input"]
        self.network = network
        self.position = 0
        self.values: dict[str, Any] = dict(zip(names, inputs, strict=True))

    def branch(self) -> Execution:
        """Return another execution that continues from here. This one stays where it is."""
        other = copy.copy(self)
        other.values = dict(self.values)
        for name in self.network.overwritten:
            if name in other.values:
                other.values[name] = other.values[name].clone()
        return other

    def step(self, watch: Watchers = NO_WATCHERS) -> tuple[str, Any]:
        """Run the next node, show its value to its watcher, and return its name and value."""
        node = self.network.graph.nodes[self.position]
        value = self.network.run_node(node, self.values)
        if node.name in watch:
            watch[node.name](value)
        self.put(value)
        return node.name, value

    def put(self, value: Any) -> None:
        """Set the value of the next node instead of running it."""
        name = self.network.graph.nodes[self.position].name
        self.values[name] = value
        for unread in self.network.last_uses[name]:
            del self.values[unread]
        self.position += 1

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Run the remaining nodes, and yield each one's name and value, valid until the
        next.
        """
        while self.position < len(self.network.graph.nodes):
            yield self.step()

    def advance(self, stop: int | None = None, watch: Watchers = NO_WATCHERS) -> Execution:
        """Run the nodes before index `stop`, by default all that remain, and return self."""
        if stop is None:
            stop = len(self.network.graph.nodes)
        while self.position < stop:
            self.step(watch)
        return self

    def output(self) -> Any:
        """Return the network's output, in the type of the traced model's, once all nodes have
        run.
        """
        graph = self.network.graph
        output = channels_first(self._raw_output())
        return graph.rebuild(output) if graph.rebuild else output

    def outputs(self) -> list[Tensor]:
        """Return the tensors of the network's output, in order. A complex one is given as its
        real view.
        """
        tensors = []
        for leaf in pytree.tree_leaves(self._raw_output()):
            if isinstance(leaf, Tensor) and leaf.is_complex():
                tensors.append(torch.view_as_real(leaf))
            elif isinstance(leaf, Tensor):
                tensors.append(leaf)
        return tensors

    def float_outputs(self) -> list[Tensor]:
        """Return the floating-point tensors of the network's output, in order."""
        return float_leaves(self.outputs())

    def _raw_output(self) -> Any:
        return map_refs(self.network.graph.output, self.values.__getitem__)


def float_leaves(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nested output, in order."""
    return [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def layer_arguments(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a node's layer.

    Nothing may keep the dict, as it would keep the values alive.
    """
    if node.op == "input":
        return {"input": values[node.name]}
    return {key: map_refs(value, values.__getitem__) for key, value in node.inputs.items()}
