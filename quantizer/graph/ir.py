"""The graph of a traced model: nodes in execution order, which are immutable, and the tensors
that they use, by path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantizer.graph.op_row import Op
from quantizer.graph.ops import OPS, unknown
from quantizer.graph.targets import draws_numbers
from quantizer.graph.tracing.lengths import Length
from quantizer.storage.deferred_tensor import DeferredTensor, loaded

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of `forward`."""
_Arguments = Mapping[str, Any]
_Value = TypeVar("_Value")
_ChangeRef = Callable[[str], Any]
"""Returns what replaces the reference to the node of this name."""


@dataclass(frozen=True)
class Ref:
    """A reference to the value that another node makes."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Args:
        name: unique in the graph, for example "Net::Net/Conv2d[conv]/conv2d".
        op: the operator's name in the table `OPS`.
        target: how torch calls it ("aten.conv2d.default", "operator.getitem").
        inputs: by argument name what other nodes make, as `Ref`s, also nested in lists.
        attrs: by argument name the constants of the call.
        params: the paths of the tensors that the layer owns, by role.
        scope: the dotted path of the module in which the operation ran.
        classes: the classes of that module and of those around it, innermost first.
        shape: None where a size follows the batch, else the sizes of the example; as a whole
            None for an operation that makes no single tensor.
        dtype: of the tensor that it makes.
        open_axes: axes of `shape` whose sizes follow the graph's `lengths`.
    """

    name: str
    op: str
    target: str
    inputs: _Arguments = field(default_factory=dict)
    attrs: _Arguments = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    scope: str = ""
    classes: tuple[str, ...] = ()
    shape: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None
    open_axes: tuple[int, ...] = ()

    @property
    def row(self) -> Op:
        """Return the operator's row of the table, an "unknown" one if there is none."""
        known = OPS.get(self.op)
        return known or unknown(self.op)

    @property
    def outer_scope(self) -> str:
        """Return the path of the module around the one in which the operation ran."""
        return self.scope.rpartition(".")[0]

    @property
    def rank(self) -> int:
        """Return how many axes the node's tensor has, 0 if that is not known."""
        return len(self.shape or ())

    @property
    def is_tensor(self) -> bool:
        """Return whether the node gives a parameter or a constant of the model."""
        return self.op in ("parameter", "constant")

    @property
    def is_float(self) -> bool:
        """Return whether the node makes one floating-point tensor."""
        return self.dtype is not None and self.dtype.is_floating_point

    @property
    def is_multiplying(self) -> bool:
        """Return whether it is a linear or convolution layer that owns its weight and has one
        input.
        """
        if not self.row.is_linear_or_convolution or "weight" not in self.params:
            return False
        return isinstance(self.inputs.get("input"), Ref)

    @property
    def is_random(self) -> bool:
        """Return whether the node draws random numbers."""
        return draws_numbers(self.target, self.attrs)

    @property
    def is_join(self) -> bool:
        """Return whether the node puts values of several tensors into one.

        A write that adds to what is there computes, and is not a join.
        """
        if self.attrs.get("accumulate") or self.attrs.get("reduce"):
            return False
        return self.row.kind == "join" and self.is_float

    def joined(self) -> tuple[str, ...]:
        """Return the names of the nodes whose values a join puts into its output."""
        names: list[str] = []
        for argument in self.row.joins:
            names += references(self.inputs.get(argument))
        return tuple(names)

    @property
    def operands(self) -> dict[str, str]:
        """Return the nodes that a multiplying layer reads, by argument.

        These are its input, and for experts the assignment of rows to experts.
        """
        names: dict[str, str] = {}
        for key, value in self.inputs.items():
            is_operand = key == "input" or self.row.experts
            if is_operand and isinstance(value, Ref):
                names[key] = value.name
        return names

    def input_roles(self) -> dict[str, str]:
        """Return the node that each whole argument reads, by role.

        The roles are "input" for the first argument, then "input_1", "input_2", …
        """
        roles: dict[str, str] = {}
        for index, value in enumerate(self.inputs.values()):
            role = f"input_{index}" if index else "input"
            if isinstance(value, Ref):
                roles[role] = value.name
        return roles

    def refs(self) -> Iterator[str]:
        """Yield the nodes that this one reads, in argument order, twice if it reads one
        twice.
        """
        return references(self.inputs)

    def reading(self, change: _ChangeRef) -> Node:
        """Return a copy with each reference among its inputs replaced by `change(name)`."""
        inputs = map_refs(self.inputs, change)
        return replace(self, inputs=inputs)

    def on(self, device: torch.device) -> Node:
        """Return a copy whose constants name `device` instead of the device of the trace."""
        attrs = dict(self.attrs)
        for key, value in attrs.items():
            if isinstance(value, torch.device):
                attrs[key] = device
        return replace(self, attrs=attrs)


@dataclass(frozen=True)
class PassChange:
    """A change that a pass made to the parameters of `layers`, for reports. The pass's row says
    what `amount` is.
    """

    rewrite: str
    layers: tuple[str, ...]
    amount: float = 0.0


@dataclass(frozen=True, repr=False)
class Graph:
    """A traced model.

    Args:
        model: the name of its class.
        nodes: in execution order.
        output: the returned structure, with `Ref`s for tensors.
        tensors: parameters, buffers and constants by path.
        input_paths: where each input is in the call, as access paths into (args, kwargs).
        lengths: the sizes of inputs, besides the batch, that each call may choose.
        absorbed: for each layer that a pass folded away the layer that took it over.
        normal: mean and standard deviation of each output channel of a layer, as folded batch
            norms state them; float64 [channels].
        changes: what passes did to the parameters.
        deviations: the passes that have changed what the graph computes.
        rebuild: makes the model's own output type from the plain structure.
        output_names: of the output's leaves, in order.
        constants: the paths of tensors that only the code of the model holds.
        code: the digest of the code that was traced; empty if not known.
    """

    model: str
    nodes: tuple[Node, ...]
    output: Any
    tensors: Mapping[str, Tensor]
    input_paths: tuple[tuple[Any, ...], ...] = ()
    lengths: tuple[Length, ...] = ()
    absorbed: Mapping[str, str] = field(default_factory=dict)
    normal: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    changes: tuple[PassChange, ...] = ()
    deviations: tuple[str, ...] = ()
    rebuild: Callable[[Any], Any] | None = field(default=None, compare=False)
    output_names: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    code: str = ""

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} nodes of {self.model})"

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Return the nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the place of each node in execution order."""
        indices: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            indices[node.name] = index
        return indices

    @cached_property
    def uses(self) -> Counter[str]:
        """Return how many layers use the tensor at each path."""
        uses: Counter[str] = Counter()
        for node in self.nodes:
            uses.update(node.params.values())
        return uses

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Return a table for what is computed of the graph alone and needed again, by name."""
        return {}

    def weight(self, node: Node) -> Tensor:
        """Return the weight of a layer, or the tensor that a parameter or constant gives."""
        return self.tensors[node.params["weight"]]

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Return the readers of each node's values; "" stands for the network's output.

        Who reads only the shape is not a reader.
        """
        table: dict[str, tuple[str, ...]] = dict.fromkeys(self.index, ())
        for node in self.nodes:
            if not node.row.reads_values:
                continue
            inputs = dict(node.inputs)
            if node.row.shape_of:
                inputs.pop(node.row.shape_of, None)
            for name in dict.fromkeys(references(inputs)):
                table[name] += (node.name,)
        for name in dict.fromkeys(references(self.output)):
            table[name] += ("",)
        return table

    @property
    def is_of_modules(self) -> bool:
        """Return whether it is the graph of a module tree, which shows no values between
        layers.
        """
        return any(node.op == "module_input" for node in self.nodes)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors, the CPU if there are none."""
        for tensor in self.tensors.values():
            return tensor.device
        return torch.device("cpu")

    def on(self, device: torch.device) -> Graph:
        """Return the graph with its tensors and its calls on a device."""
        if device == self.device:
            return self
        tensors = dict(self.tensors)
        for path, tensor in tensors.items():
            if isinstance(tensor, DeferredTensor):
                tensors[path] = tensor.on_device(device)
            else:
                tensors[path] = tensor.to(device)
        nodes = tuple(node.on(device) for node in self.nodes)
        return self.replaced(nodes=nodes, tensors=tensors)

    @cached_property
    def is_deferred(self) -> bool:
        """Return whether some tensors are read only when they are needed."""
        return any(isinstance(tensor, DeferredTensor) for tensor in self.tensors.values())

    def in_memory(self) -> Graph:
        """Return the graph with all deferred tensors read."""
        if not self.is_deferred:
            return self
        tensors = loaded(dict(self.tensors))
        return self.replaced(tensors=tensors)

    def source(self, node: Node) -> Node | None:
        """Return the node whose value is the first argument; None if it is not a reference."""
        for first in node.inputs.values():
            return self.by_name[first.name] if isinstance(first, Ref) else None
        return None

    def replaced(self, **changes: Any) -> Graph:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def mapped(self, change: Callable[[Node], Node]) -> Graph:
        """Return a copy with each node as `change` returns it."""
        nodes = tuple(map(change, self.nodes))
        return self.replaced(nodes=nodes)

    def reading(self, change: _ChangeRef) -> Graph:
        """Return a copy with each reference of nodes and output replaced by `change(name)`."""
        nodes = tuple(node.reading(change) for node in self.nodes)
        output = map_refs(self.output, change)
        return self.replaced(nodes=nodes, output=output)


def references(value: Any) -> Iterator[str]:
    """Yield the names of all `Ref`s inside a nested value."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)


def readers(
    graph: Graph, name: str, ends: Callable[[Node, str], bool] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (reader, what it reads) of a node's values, directly or through moves; "" is the
    network's output.

    Args:
        graph: the traced network.
        name: of the node.
        ends: says of a move and what it reads that it counts as a reader.
    """
    for reader in graph.consumers[name]:
        node = graph.by_name.get(reader)
        is_move = node is not None and node.row.kind == "passthrough"
        if node is None or not is_move or (ends is not None and ends(node, name)):
            yield reader, name
        else:
            yield from readers(graph, reader, ends)


def walk_back(
    graph: Graph, names: Iterable[str], operands: Callable[[Node], Iterable[str]]
) -> Iterator[Node]:
    """Yield some nodes and those before them, each once.

    Args:
        graph: the traced network.
        names: where the walk begins.
        operands: returns the nodes that a node leads to.
    """
    pending = [*names]
    seen: set[str] = set()
    while pending:
        node = graph.by_name[pending.pop()]
        if node.name not in seen:
            seen.add(node.name)
            yield node
            pending += operands(node)


def depending(graph: Graph, names: Set[str]) -> set[str]:
    """Return the nodes whose values depend on those of some nodes, and these."""
    reached = {*names}
    for node in graph.nodes:
        if not reached.isdisjoint(node.refs()):
            reached.add(node.name)
    return reached


def derived(compute: Callable[[Graph], _Value]) -> Callable[[Graph], _Value]:
    """Make a function of a graph alone run once for each graph."""
    key = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def known(graph: Graph) -> _Value:
        """Return the value of an earlier call, if there was one."""
        if key not in graph.derived:
            graph.derived[key] = compute(graph)
        value: _Value = graph.derived[key]
        return value

    return known


def map_refs(value: Any, change: _ChangeRef) -> Any:
    """Return a nested value with each `Ref` replaced by `change(name)`."""
    if isinstance(value, Ref):
        return change(value.name)
    if isinstance(value, (list, tuple)):
        items = [map_refs(item, change) for item in value]
        return type(value)(items)
    if isinstance(value, Mapping):
        mapped: dict[str, Any] = {}
        for key, item in value.items():
            mapped[key] = map_refs(item, change)
        return mapped
    return value


def rewire(graph: Graph, moved: Mapping[str, str], absorbed: Mapping[str, str]) -> Graph:
    """Return the graph without some nodes, whose readers read other nodes instead.

    Args:
        graph: before the change.
        moved: for each node to drop the node that is read in its place.
        absorbed: what to add to the graph's `absorbed`.
    """

    def final(name: str) -> Ref:
        while name in moved:
            name = moved[name]
        return Ref(name)

    nodes = tuple(node for node in graph.nodes if node.name not in moved)
    history = {**graph.absorbed, **absorbed}
    remaining = graph.replaced(nodes=nodes, absorbed=history)
    return remaining.reading(final)
