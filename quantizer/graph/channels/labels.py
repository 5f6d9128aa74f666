"""Labels: numbers in the places of a node's values, which say where each value comes from. They
follow the channels of a layer through a graph: each value downstream is labelled with the
number of the channel of which it is a multiple.

How an operator moves labels is its row's `axes` (`axis_rules`). A value that comes from no
channel is labelled `NONE`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import Commutes, LabelledCall, changes
from quantizer.graph.ir import Graph, Node, derived, map_refs, references
from quantizer.graph.targets import call

NONE = -1
"""The label of a value that comes from no channel."""
UNFOLLOWED = (RuntimeError, TypeError, ValueError, IndexError, KeyError)
"""What torch raises where an operator cannot run on labels."""
_EXAMPLE_BATCH = 2
_CPU = torch.device("cpu")
_META = torch.device("meta")


def run_node(node: Node, value_of: Callable[[str], Any]) -> Any:
    """Run a node's operator on the CPU.

    Args:
        node: a call of torch without parameters.
        value_of: gives what stands for the value of each node that it reads.
    """
    inputs = map_refs(node.inputs, value_of)
    attrs = node.on(_CPU).attrs
    return call(node.target, {**attrs, **inputs})


def example_shape(node: Node) -> torch.Size | None:
    """Return the shape of a node's tensor for a batch of two, None if it makes no single
    tensor.
    """
    if node.shape is None:
        return None
    sizes = [_EXAMPLE_BATCH if size is None else size for size in node.shape]
    return torch.Size(sizes)


def filled_labels(shape: torch.Size, label: float) -> Tensor:
    """Return one label for all values of a shape, without memory for each."""
    return torch.full((), float(label)).expand(shape)


def along_axis(vector: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return labels of a shape that differ only along one axis.

    Args:
        vector: the labels along that axis.
        shape: of the result.
        axis: along which they are.
    """
    sizes = [1] * len(shape)
    sizes[axis] = len(vector)
    return vector.float().view(sizes).expand(shape)


def numbered_labels(shape: torch.Size, axis: int) -> Tensor:
    """Return labels of a shape that count along one axis."""
    return along_axis(torch.arange(shape[axis]), shape, axis)


def compress_labels(labels: Tensor) -> Tensor:
    """Return the same labels, with stride 0 along each axis along which they do not change."""
    for axis in range(labels.dim()):
        size = labels.shape[axis]
        if size < 2 or not labels.stride(axis):
            continue
        first = labels.narrow(axis, 0, 1)
        # Most labels that change differ at the ends, which is faster to compare
        last = labels.narrow(axis, size - 1, 1)
        if torch.equal(first, last) and bool((labels == first).all()):
            labels = first.expand(labels.shape)
    return labels


def changing_axes(labels: Tensor) -> list[int]:
    """Return the axes along which compressed labels change."""
    return [axis for axis in range(labels.dim()) if changes(labels, axis)]


def channels_along(labels: Tensor, axis: int) -> tuple[int, ...] | None:
    """Return compressed labels along one axis, None if they change along another."""
    axis %= labels.dim()
    if set(changing_axes(labels)) - {axis}:
        return None
    vector = labels.movedim(axis, -1)
    while vector.dim() > 1:
        vector = vector[0]
    return tuple(int(label) for label in vector.tolist())


def distinct(labels: Any) -> frozenset[int]:
    """Return all channels among compressed labels of one value, or of several."""
    if labels is None:
        return frozenset()
    if isinstance(labels, (list, tuple)):
        return frozenset().union(*map(distinct, labels))
    for axis, stride in enumerate(labels.stride()):
        if not stride:
            labels = labels.narrow(axis, 0, min(1, labels.shape[axis]))
    return frozenset(int(label) for label in labels.unique().tolist() if label != NONE)


def carried(graph: Graph, node: Node, labels: Mapping[str, Any]) -> Any:
    """Return the labels of what a node makes, of each of several results; None if they are
    not known.

    Args:
        graph: the traced network.
        node: the operator.
        labels: the labels of nodes that it reads.
    """
    made = meta_values(graph)
    value = made.get(node.name)
    rule = node.row.axes
    has_no_channels = node.dtype is not None and not node.is_float
    if rule is None or value is None or has_no_channels:
        return None
    keys = _carrying_arguments(node)
    others = {key: value for key, value in node.inputs.items() if key not in keys}
    if not labels.keys().isdisjoint(references(others)):
        return None
    is_one = isinstance(value, Tensor)
    shape = value.shape if is_one else value[0].shape
    try:
        values = map_refs(node.inputs, made.__getitem__)
        labelled = LabelledCall(
            map_refs(node.inputs, labels.get),
            {**node.attrs, **values},
            shape,
            lambda: _run(graph, node, labels),
        )
        results = rule.labels(labelled)
    except UNFOLLOWED:
        return None
    if isinstance(results, (list, tuple)):
        return [None if result is None else compress_labels(result) for result in results]
    if results is None or results.shape != shape:
        return None
    first = compress_labels(results)
    return first if is_one else [first, *[None] * (len(value) - 1)]


def moved(graph: Graph, node: Node, axis: int) -> int | None:
    """Return the output's axis that holds an axis of the first input, whole and in order.

    It is None without such an axis, or if a rotation does not commute with the operator.
    """
    source = graph.source(node)
    if source is None or source.name not in paths(node, Commutes.ROTATIONS):
        return None
    read = meta_values(graph).get(source.name)
    if not isinstance(read, Tensor):
        return None
    labels = carried(graph, node, {source.name: numbered_labels(read.shape, axis)})
    axes = changing_axes(labels) if isinstance(labels, Tensor) else []
    if not axes or channels_along(labels, axes[0]) != tuple(range(read.shape[axis])):
        return None
    return axes[0]


def moved_back(graph: Graph, node: Node, axis: int) -> int | None:
    """Return the axis of the first input that `moved` takes to the output's `axis`."""
    source = graph.source(node)
    rank = 0 if source is None else source.rank
    for before in range(rank):
        if moved(graph, node, before) == axis:
            return before
    return None


def _run(graph: Graph, node: Node, labels: Mapping[str, Any]) -> Any:
    """Run the operator on labels, with `NONE` for values without labels."""
    made = meta_values(graph)

    def stand_in(name: str) -> Any:
        """Return the labels of an operand, or constants in its shape and dtype."""
        value = made[name]
        if name in labels or not isinstance(value, Tensor):
            return labels.get(name, value)
        if value.dtype == torch.bool:
            raise ValueError("what a mask selects is not known")
        label = NONE if value.is_floating_point() else 0
        return torch.full((), label, dtype=value.dtype).expand(value.shape)

    return run_node(node, stand_in)


@derived
def meta_values(graph: Graph) -> dict[str, Any]:
    """Return what each node makes, as tensors without memory, and sizes as numbers.

    Nodes whose shape depends on values are left out. The table is shared by all callers.
    """
    values: dict[str, Any] = {}
    tensors = {path: tensor.to(_META) for path, tensor in graph.tensors.items()}
    with torch.no_grad():
        for node in graph.nodes:
            if not values.keys() >= set(node.refs()):
                continue
            try:
                values[node.name] = _meta_value(node, values, tensors)
            except (*UNFOLLOWED, AttributeError, AssertionError):
                # The shape depends on values, or the layer is no operator of torch
                continue
    return values


def _meta_value(node: Node, values: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if node.op == "input":
        shape = example_shape(node)
        if shape is None:
            return node.attrs["value"]
        return torch.empty(shape, dtype=node.dtype, device=_META)
    if node.is_tensor:
        return tensors[node.params["weight"]]
    if not node.row.aten:
        # A layer of this package has the shape of its input, except for a product's channels
        read = values[next(node.refs())]
        if not node.is_multiplying:
            return read
        channels = (node.shape or ())[-1]
        return read.new_empty(*read.shape[:-1], channels)
    params = {key: tensors[path] for key, path in node.params.items()}
    inputs = map_refs(node.inputs, values.__getitem__)
    arguments = {**node.on(_META).attrs, **params, **inputs}
    # Attention on this device may lay out its result so that it has no view
    if node.target == "aten.view.default":
        return arguments["input"].reshape(arguments["size"])
    return call(node.target, arguments)


def paths(node: Node, how: Commutes = Commutes.SCALING) -> tuple[str, ...]:
    """Return the nodes whose channels go through a node that commutes with a change of them."""
    if how not in node.row.commutes:
        return ()
    arguments = [node.inputs.get(key) for key in _carrying_arguments(node)]
    return tuple(references(arguments))


def _carrying_arguments(node: Node) -> tuple[str, ...]:
    """Return the arguments whose channels go through a node."""
    if node.row.axes is None:
        return ()
    return node.row.axes.arguments or tuple(node.inputs)[:1]
