"""The graph: nodes in execution order, each a frozen value. Structure and names only; tensors
stand beside it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.lengths import Length
from quantizer.graph.op_row import Op
from quantizer.graph.ops import OPS, unknown
from quantizer.storage.deferred_tensor import DeferredTensor, loaded


@dataclass(frozen=True)
class Ref:
    """The value that another node makes."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation: `inputs` hold references by argument name (also nested in lists), `attrs`
    constants, `params` tensor paths.

    `target` says how torch runs it ("aten.conv2d.default", "operator.getitem"); `shape` has
    None where it follows the batch, and else the example's sizes, of which those along
    `open_axes` follow the graph's `lengths`. `scope` is the dotted path of the module the
    operation ran in, `classes` the classes of that module and of those around it.
    """

    name: str
    op: str
    target: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    scope: str = ""
    classes: tuple[str, ...] = ()
    shape: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None
    open_axes: tuple[int, ...] = ()

    @property
    def row(self) -> Op:
        """The operator's row, or an "unknown" one."""
        return OPS.get(self.op) or unknown(self.op)

    @property
    def rank(self) -> int:
        """How many axes the tensor has that it makes; 0 if that is not known."""
        return len(self.shape or ())

    @property
    def is_float(self) -> bool:
        """Whether the node makes one floating-point tensor."""
        return self.dtype is not None and self.dtype.is_floating_point

    @property
    def is_multiplying(self) -> bool:
        """Whether it is a linear or convolution layer with a weight of its own and one
        input.
        """
        owns_weight = self.row.is_linear_or_convolution and "weight" in self.params
        return owns_weight and isinstance(self.inputs.get("input"), Ref)

    @property
    def is_join(self) -> bool:
        """Whether the node puts values of several tensors into one; a write that adds to what
        is there computes.
        """
        adds = self.attrs.get("accumulate") or self.attrs.get("reduce")
        return self.row.kind == "join" and self.is_float and not adds

    def joined(self) -> tuple[str, ...]:
        """Return the names of the nodes whose values a join puts into its output."""
        names: list[str] = []
        for argument in self.row.joins:
            names += references(self.inputs.get(argument))
        return tuple(names)

    @property
    def operands(self) -> dict[str, str]:
        """The nodes that a multiplying layer reads, by argument: its input, and what says which
        rows are whose.
        """
        names = {
            key: value.name for key, value in self.inputs.items() if isinstance(value, Ref)
        }
        return {key: name for key, name in names.items() if key == "input" or self.row.experts}

    def input_roles(self) -> dict[str, str]:
        """The node read by each whole argument, by its role: "input" for the first argument,
        then "input_1", …
        """
        return {
            f"input_{index}" if index else "input": value.name
            for index, value in enumerate(self.inputs.values())
            if isinstance(value, Ref)
        }

    def refs(self) -> Iterator[str]:
        """Names of the nodes this one reads, in argument order, repeated when read twice."""
        for value in self.inputs.values():
            yield from references(value)


@dataclass(frozen=True)
class Change:
    """What a pass did to the parameters of `layers`, for people to read; the pass's row says
    what `amount` is.
    """

    rewrite: str
    layers: tuple[str, ...]
    amount: float = 0.0


@dataclass(frozen=True)
class Graph:
    """A traced model. `tensors` holds parameters, buffers and constants by path.

    `absorbed` says where folded layers went; `normal` has the mean and the standard deviation
    of each output channel that folded batch norms promise, float64 [channels]; `changes` is
    what passes did to the parameters, and `deviations` names the passes that have changed what
    the graph computes. `input_paths` are where each input stands in the call, as (args, kwargs)
    access paths; `lengths` are the sizes of inputs that each call chooses; `output` is the
    returned structure with `Ref`s for tensors, `rebuild` makes the model's own output type of
    it; `output_names` are those of its leaves, in order. `constants` are paths of tensors that
    only the code of the model holds.
    """

    model: str
    nodes: tuple[Node, ...]
    output: Any
    tensors: Mapping[str, Tensor]
    input_paths: tuple[tuple[Any, ...], ...] = ()
    lengths: tuple[Length, ...] = ()
    absorbed: Mapping[str, str] = field(default_factory=dict)
    normal: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    deviations: tuple[str, ...] = ()
    rebuild: Callable[[Any], Any] | None = field(default=None, compare=False)
    output_names: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by layer name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def index(self) -> dict[str, int]:
        """Where each layer stands in execution order."""
        return {node.name: at for at, node in enumerate(self.nodes)}

    @cached_property
    def uses(self) -> Counter[str]:
        """How many layers use the tensor at each path."""
        return Counter(path for node in self.nodes for path in node.params.values())

    def weight(self, node: Node) -> Tensor:
        """The weight of a layer, or the tensor that a parameter or constant gives."""
        return self.tensors[node.params["weight"]]

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Who reads each node's values, by name; shapes do not count, "" stands for the
        network's output.
        """
        table: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            if node.row.reads_values:
                read = {
                    key: value for key, value in node.inputs.items() if key != node.row.shape_of
                }
                for name in dict.fromkeys(references(read)):
                    table[name].append(node.name)
        for name in dict.fromkeys(references(self.output)):
            table[name].append("")
        return {name: tuple(readers) for name, readers in table.items()}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    def on(self, device: torch.device) -> Graph:
        """The same on a device, with it in place of those that calls in the trace name."""

        def moved(node: Node) -> Node:
            attrs = {
                key: device if isinstance(value, torch.device) else value
                for key, value in node.attrs.items()
            }
            return dataclasses.replace(node, attrs=attrs)

        if device == self.device:
            return self
        tensors = {
            path: each.at(device) if isinstance(each, DeferredTensor) else each.to(device)
            for path, each in self.tensors.items()
        }
        return self.mapped(moved).replaced(tensors=tensors)

    @property
    def is_deferred(self) -> bool:
        """Whether there are tensors that are read only when they are needed."""
        return any(isinstance(tensor, DeferredTensor) for tensor in self.tensors.values())

    def in_memory(self) -> Graph:
        """The same with all tensors read."""
        return self.replaced(tensors=loaded(dict(self.tensors))) if self.is_deferred else self

    def source(self, node: Node) -> Node | None:
        """The node whose value is the first argument."""
        first = next(iter(node.inputs.values()), None)
        return self.by_name[first.name] if isinstance(first, Ref) else None

    def replaced(self, **changes: Any) -> Graph:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def mapped(self, change: Callable[[Node], Node]) -> Graph:
        """A copy with each node as `change` leaves it."""
        return self.replaced(nodes=tuple(map(change, self.nodes)))


def references(value: Any) -> Iterator[str]:
    """Names of all `Ref`s inside a nested value."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)


def readers(graph: Graph, name: str) -> Iterator[tuple[str, str]]:
    """Yield (reader, what it reads) of a node's values, directly or through moves; "" is the
    network's output.
    """
    for reader in graph.consumers[name]:
        if reader and graph.by_name[reader].row.kind == "passthrough":
            yield from readers(graph, reader)
        else:
            yield reader, name


def map_refs(value: Any, change: Callable[[str], Any]) -> Any:
    """The nested value with each `Ref` replaced by `change(name)`."""
    if isinstance(value, Ref):
        return change(value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(map_refs(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: map_refs(item, change) for key, item in value.items()}
    return value


def rewire(
    graph: Graph, moved: Mapping[str, str], absorbed: Mapping[str, str] | None = None
) -> Graph:
    """Drop the nodes in `moved`, whose readers read the node moved to; `absorbed` records who
    took which layer.
    """

    def final(name: str) -> Ref:
        while name in moved:
            name = moved[name]
        return Ref(name)

    nodes = tuple(
        dataclasses.replace(node, inputs=map_refs(node.inputs, final))
        for node in graph.nodes
        if node.name not in moved
    )
    history = {**graph.absorbed, **(absorbed or {})}
    return graph.replaced(nodes=nodes, output=map_refs(graph.output, final), absorbed=history)
