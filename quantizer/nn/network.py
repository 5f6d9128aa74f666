"""A graph as a module that runs it node by node. It executes and lets others look; it decides
nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantizer.nn as layers
from quantizer.errors import DataError
from quantizer.graph.describe import describe, overwritten
from quantizer.graph.ir import Graph, Node, references
from quantizer.graph.lengths import Length
from quantizer.nn.execution import Execution, Watchers, arguments
from quantizer.nn.layer import Layer
from quantizer.storage.deferred_tensor import CPU, DeferredTensor


class Network(nn.Module):
    """Runs a graph with one layer per node; called as the model it was traced from.

    `layers` holds them by name; `module_names` says what each is called in the generated code
    and in `state_dict`; `last_uses` names for each node the values that nothing reads after it,
    `overwritten` the nodes whose values are.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.layers: dict[str, Layer] = {}
        self.module_names = {
            node.name: f"module_{index}" for index, node in enumerate(graph.nodes)
        }
        for node in graph.nodes:
            layer = build_layer(graph, node)
            self.layers[node.name] = layer
            self.add_module(self.module_names[node.name], layer)
        self.last_uses: Mapping[str, Sequence[str]] = _last_uses(graph)
        self.overwritten: Collection[str] = frozenset(
            filter(None, (overwritten(graph, node) for node in graph.nodes))
        )
        weighted = [node.name for node in graph.nodes if node.params]
        self._followers = dict(pairwise(weighted)) if graph.is_deferred else {}
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the traced model returns, in its own output type."""
        return self.observe(args, kwargs, {})

    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Watchers) -> Any:
        """Run and show each watched node's value to its watcher; returns the output."""
        return self.start(args, kwargs).advance(watch=watch).output()

    def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Execution:
        """An execution of this call, before its first node.

        Raises:
            DataError: the call is not shaped like the example the model was traced with.
        """
        return Execution(self, self.inputs(args, kwargs))

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """The node's layer on the values that it reads.

        Raises:
            DataError: torch refuses them; tracing accepted the first batch, so it is this one.
        """
        if node.name in self._followers:
            _prefetch(self.layers[self._followers[node.name]])
        try:
            return self.layers[node.name](**arguments(node, values))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"{node.name} cannot run on this input: {reason}",
                help="check shapes, dtypes and values of the data",
            ) from error

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The network's inputs picked out of a call.

        Raises:
            DataError: the call is not shaped like the example the model was traced with.
        """
        inputs, found = [node for node in self.graph.nodes if node.op == "input"], []
        names = _names_of_lengths(self.graph)
        for index, (node, path) in enumerate(zip(inputs, self.graph.input_paths, strict=True)):
            value: Any = (args, kwargs)
            try:
                for key in path:
                    value = value[key]
            except (KeyError, IndexError, TypeError):
                where = "".join(f"[{key!r}]" for key in path[1:])
                raise DataError(
                    f"{node.name} is missing: no {'kwargs' if path[0] else 'args'}{where} in "
                    "this call"
                ) from None
            _check_input(node, value, names.get(index, {}))
            found.append(value)
        count = len(pytree.tree_leaves((args, dict(kwargs))))
        if count != len(found):
            raise DataError(
                f"{self.graph.model} was traced with {len(found)} inputs, but this call has "
                f"{count}"
            )
        pairs = zip(inputs, found, strict=True)
        sizes = {
            node.name: value.shape[0]
            for node, value in pairs
            if node.shape and node.shape[0] is None
        }
        if _differ(sizes):
            raise DataError(f"the inputs have batches of different sizes: {sizes}")
        for length in self.graph.lengths:
            _check_length(
                length, {inputs[at].name: found[at].shape[axis] for at, axis in length.axes}
            )
        return found

    def quantizers(self) -> Iterator[tuple[str, str, nn.Module]]:
        """(layer name, role, quantizer) for all that are attached."""
        for name, layer in self.layers.items():
            for role, quantizer in layer.quantizers.items():
                yield name, role, quantizer


def build_layer(graph: Graph, node: Node) -> Layer:
    """The node's layer with its parameters filled from the graph; it shares their memory until
    they are quantized.
    """
    call = describe(graph, node)
    layer: Layer = getattr(layers, call.cls)(*call.args, **call.kwargs)
    for key, path in node.params.items():
        tensor = graph.tensors[path]
        setattr(
            layer,
            key,
            tensor if key in layer._buffers else nn.Parameter(tensor, requires_grad=False),
        )
    return layer.eval()


def _prefetch(layer: Layer) -> None:
    """Have a layer's weights read while a device computes what comes before; the CPU has no
    time to spare.
    """
    for tensor in (*layer.parameters(), *layer.buffers()):
        if isinstance(tensor, DeferredTensor) and tensor.device != CPU:
            tensor.prefetch()


def _names_of_lengths(graph: Graph) -> dict[int, dict[int, str]]:
    """By input and axis the name of the size that a call chooses there."""
    names: dict[int, dict[int, str]] = {}
    for length in graph.lengths:
        for index, axis in length.axes:
            names.setdefault(index, {})[axis] = length.name
    return names


def _check_input(node: Node, value: Any, lengths: Mapping[int, str]) -> None:
    """Shape and dtype as traced, but for the batch and `lengths` (names by axis); numbers as
    traced, they are baked in.

    A size that is open is not compared: while torch exports, that would fix it.
    """
    if node.shape is None:
        if type(value) is not type(node.attrs["value"]) or value != node.attrs["value"]:
            raise DataError(
                f"{node.name}: the model was traced with {node.attrs['value']!r} here, got "
                f"{value!r}"
            )
        return
    if not isinstance(value, Tensor):
        raise DataError(f"{node.name}: expected a tensor, got {type(value).__name__}")
    wanted = [
        "b" if size is None else lengths.get(axis, size) for axis, size in enumerate(node.shape)
    ]
    fits = len(value.shape) == len(wanted) and all(
        isinstance(want, str) or want == got
        for want, got in zip(wanted, value.shape, strict=True)
    )
    if not fits or value.dtype != node.dtype:
        want = f"[{', '.join(map(str, wanted))}] {node.dtype}"
        raise DataError(f"{node.name}: expected {want}, got {list(value.shape)} {value.dtype}")


def _differ(sizes: Mapping[str, int]) -> bool:
    """Whether one is another than the first; where torch exports they are symbols, and the
    answer makes them one.
    """
    return any(size != first for first in list(sizes.values())[:1] for size in sizes.values())


def _check_length(length: Length, sizes: Mapping[str, int]) -> None:
    """One size in all inputs, which the model takes."""
    if _differ(sizes):
        raise DataError(f"the inputs have sequences of different lengths: {dict(sizes)}")
    for name, size in sizes.items():
        if size not in length:
            raise DataError(f"{name}: the model takes sequences of {length}, got one of {size}")


def _last_uses(graph: Graph) -> dict[str, list[str]]:
    """For each node the values that nothing reads after it."""
    kept = set(references(graph.output))
    last: dict[str, str] = {node.name: node.name for node in graph.nodes}
    for node in graph.nodes:
        for name in node.refs():
            last[name] = node.name
    frees: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for name, reader in last.items():
        if name not in kept:
            frees[reader].append(name)
    return frees
