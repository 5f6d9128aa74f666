"""Which channel of a layer each element downstream is a multiple of: tensors of channel
numbers, moved as values are.

A label is the number of a channel, or `NONE`. How an operator moves them is its row's `axes`
(`axis_rules`). Labels lie in memory once: axes along which they are all alike have stride 0.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.axis_rules import Commutes, LabelledCall, changes, is_padded
from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.targets import call

NONE = -1
BATCH = 2
META, LABELS = torch.device("meta"), torch.device("cpu")
_UNKNOWN = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
)


class ChannelLabels:
    """Takes labels through the operators of one graph; `values` has all values' shapes
    (`meta_values`).
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.values = graph, meta_values(graph)

    def carried(self, node: Node, labels: Mapping[str, Any]) -> Any:
        """Labels of what the node makes (a tensor, or several) of those of nodes that it reads;
        None if it has none.
        """
        made, axes = self.values.get(node.name), node.row.axes
        if axes is None or made is None or (node.dtype is not None and not node.is_float):
            return None
        others = {key: value for key, value in node.inputs.items() if key not in _keys(node)}
        if not labels.keys().isdisjoint(references(others)):
            return None
        try:
            given = {
                key: map_refs(value, self.values.__getitem__)
                for key, value in node.inputs.items()
            }
            moved = {key: map_refs(value, labels.get) for key, value in node.inputs.items()}
            labelled = LabelledCall(
                moved,
                {**node.attrs, **given},
                _first(made).shape,
                lambda: self._run(node, labels),
            )
            found = axes.labels(labelled)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError):
            # Labels are floats on the CPU: an operator that cannot move them is not followed
            return None
        if isinstance(found, (list, tuple)):
            return [compressed(item) for item in found]
        if found is None or found.shape != _first(made).shape:
            return None
        return (
            compressed(found)
            if isinstance(made, Tensor)
            else [compressed(found), *[None] * (len(made) - 1)]
        )

    def moved(self, node: Node, axis: int) -> int | None:
        """The output's axis that holds an axis of the first input, whole and in order; None if
        a rotation would not commute with the operator.
        """
        source = self.graph.source(node)
        read = self.values.get(source.name) if source is not None else None
        if (
            source is None
            or not isinstance(read, Tensor)
            or source.name not in paths(node, Commutes.ROTATIONS)
        ):
            return None
        made = self.carried(node, {source.name: numbered(read.shape, axis)})
        if not isinstance(made, Tensor):
            return None
        found = [at for at in range(made.dim()) if changes(made, at)]
        whole = found and channels_along(made, found[0]) == tuple(range(read.shape[axis]))
        return found[0] if whole else None

    def moved_back(self, node: Node, axis: int) -> int | None:
        """The axis of the first input that `moved` takes to the output's `axis`."""
        source = self.graph.source(node)
        axes = (
            range(len(source.shape)) if source is not None and source.shape is not None else ()
        )
        return next((before for before in axes if self.moved(node, before) == axis), None)

    def _run(self, node: Node, labels: Mapping[str, Any]) -> Any:
        """The operator on labels; other values are no channels."""

        def stand_in(name: str) -> Any:
            value = self.values[name]
            if name in labels or not isinstance(value, Tensor):
                return labels.get(name, value)
            if value.dtype == torch.bool:
                raise ValueError("what a mask selects is not known")
            return torch.full(
                (), NONE if value.is_floating_point() else 0, dtype=value.dtype
            ).expand(value.shape)

        inputs = {key: map_refs(value, stand_in) for key, value in node.inputs.items()}
        return call(node.target, {**_attrs(node, LABELS), **inputs})


def meta_values(graph: Graph) -> dict[str, Any]:
    """Each node's value as tensors without memory, sizes as numbers; without nodes whose shape
    follows from values.
    """
    values: dict[str, Any] = {}
    tensors = {path: tensor.to(META) for path, tensor in graph.tensors.items()}
    with torch.no_grad():
        for node in graph.nodes:
            if all(name in values for name in references(node.inputs)):
                try:
                    values[node.name] = _value(node, values, tensors)
                except _UNKNOWN:
                    # The shape follows from values, or the layer is no operator of torch
                    continue
    return values


def _value(node: Node, values: dict[str, Any], tensors: dict[str, Any]) -> Any:
    if node.op == "input":
        if node.shape is None:
            return node.attrs["value"]
        return torch.empty(
            [BATCH if size is None else size for size in node.shape],
            dtype=node.dtype,
            device=META,
        )
    if node.op in ("parameter", "constant"):
        return tensors[node.params["weight"]]
    # A layer of this package, shaped as what it reads, but for the channels of a product
    if not node.row.aten:
        read = values[next(iter(node.refs()))]
        return (
            read.new_empty(*read.shape[:-1], (node.shape or ())[-1])
            if node.is_multiplying
            else read
        )
    params = {key: tensors[path] for key, path in node.params.items()}
    inputs = {key: map_refs(value, values.__getitem__) for key, value in node.inputs.items()}
    arguments = {**_attrs(node, META), **params, **inputs}
    # Attention on this device may lay out its result so that it has no view
    if node.target == "aten.view.default":
        return arguments["input"].reshape(arguments["size"])
    return call(node.target, arguments)


def _attrs(node: Node, device: torch.device) -> dict[str, Any]:
    """The constants of a node's call, as it runs on another device."""
    return {
        key: device if isinstance(value, torch.device) else value
        for key, value in node.attrs.items()
    }


def paths(node: Node, how: Commutes = Commutes.SCALING) -> tuple[str, ...]:
    """Names of the nodes whose channels go through the node so that it commutes with what is
    done to them.
    """
    keys = _keys(node) if how in node.row.commutes else ()
    return tuple(name for key in keys for name in references(node.inputs.get(key)))


def passes_shifts(node: Node) -> bool:
    """Whether a constant added to a channel is the same in what the node makes: means that take
    in padding differ.
    """
    is_whole = node.row.kind == "passthrough" or not is_padded(node.attrs)
    return (
        Commutes.SHIFTS in node.row.commutes
        and is_whole
        and node.attrs.get("divisor_override") is None
    )


def numbered(shape: torch.Size, axis: int) -> Tensor:
    """Labels that count along one axis."""
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis], dtype=torch.float32).view(view).expand(shape)


def compressed(labels: Any) -> Any:
    """The same labels, with stride 0 along each axis along which they do not change."""
    if labels is None:
        return None
    for axis, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        first = labels.narrow(axis, 0, min(size, 1))
        ends = size > 1 and stride and torch.equal(first, labels.narrow(axis, size - 1, 1))
        if ends and bool((labels == first).all()):
            labels = first.expand(labels.shape)
    return labels


def channels_along(labels: Tensor, axis: int) -> tuple[int, ...] | None:
    """The labels along one axis, None where they change along another; of `compressed`
    labels.
    """
    axis %= labels.dim()
    if any(changes(labels, other) for other in range(labels.dim()) if other != axis):
        return None
    vector = labels[tuple(slice(None) if each == axis else 0 for each in range(labels.dim()))]
    return tuple(int(label) for label in vector.tolist())


def distinct(labels: Any) -> frozenset[int]:
    """All channels among the labels of one value."""
    if labels is None:
        return frozenset()
    if isinstance(labels, (list, tuple)):
        return frozenset().union(*map(distinct, labels))
    once = labels[tuple(slice(None) if stride else slice(0, 1) for stride in labels.stride())]
    return frozenset(int(label) for label in once.unique().tolist() if label != NONE)


def _keys(node: Node) -> tuple[str, ...]:
    """The arguments whose channels go through the node."""
    axes = node.row.axes
    return () if axes is None else axes.arguments or tuple(node.inputs)[:1]


def _first(made: Any) -> Any:
    return made[0] if isinstance(made, (list, tuple)) else made
