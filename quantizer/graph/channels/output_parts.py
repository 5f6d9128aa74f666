"""The outputs of a network, and their parts, which different layers make: names, and the part
of each value.

A part ends where something is computed from several values at once: a product, a sum, a choice
by `topk`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantizer.errors import or_without
from quantizer.graph.channels.label_replay import (
    FILLED,
    UNWRITTEN,
    ExampleValues,
    Provenance,
    Replay,
    Seen,
)
from quantizer.graph.channels.labels import (
    UNFOLLOWED,
    changing_axes,
    compress_labels,
    example_shape,
    filled_labels,
    numbered_labels,
)
from quantizer.graph.channels.row_order import RowOrder, row_order
from quantizer.graph.ir import Graph, Node
from quantizer.graph.output_names import OTHERS, output_leaves, unique_names, unused_names
from quantizer.graph.tracing.batch_axes import fixed_batch, has_open_batch

MAX_PARTS = 32
"""Parts of an output that have names of their own. If there are more, the last one is the pool
of all others.
"""
_MAX_VALUES = 1 << 24
"""The largest output of which the ranges of parts are searched before there is a run."""


@dataclass(frozen=True)
class PartRange:
    """The place of a part that is all of an output between two indices of one axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class OutputPart:
    """Values of an output that one layer makes.

    Attributes:
        name: unique among all outputs and parts of a network.
        index: another name, where the part is a range along one axis, as in `0[4:7]`.
        layer: the node that makes it, the last before it is joined; "" for what is filled in.
        is_constant: whether it depends on no input.
        pooled: how many sources it stands for.
        place: where it is, if it is such a range.
    """

    name: str
    index: str | None
    layer: str
    is_constant: bool = False
    pooled: int = 1
    place: PartRange | None = None


@dataclass(frozen=True)
class Output:
    """A tensor that a network returns.

    Attributes:
        name: as the model calls it.
        node: the name of the node that makes it.
        is_float: whether it is a floating-point tensor, or a complex one.
        parts: at least one, which has the output's name if it is the only one.
        labels: gives the part of each value; None if there is one part.
        channel_axis: the axis that is read as that of channels; None without one.
        has_channels: whether they are known to be the channels of a layer.
        order: what puts its rows in an order that depends on values; None if nothing does.
        sample_axis: the axis whose size follows the batch; None if there is none, or several.
    """

    name: str
    node: str
    is_float: bool
    parts: tuple[OutputPart, ...]
    labels: PartLabels | None = None
    channel_axis: int | None = None
    has_channels: bool = False
    order: RowOrder | None = None
    sample_axis: int | None = None

    @property
    def watched(self) -> frozenset[str]:
        """Return the nodes of which a run has to keep the shape or the values."""
        names: set[str] = set()
        if self.labels is not None:
            names |= self.labels.replay.shaped | self.labels.replay.steering
        if self.order is not None:
            names |= self.order.watched
        return frozenset(names)


@dataclass(frozen=True)
class PartLabels:
    """Finds the part of each value of an output.

    Args:
        replay: leads from the sources to the output.
        labels: the label of each source.
        parts: the number of the part of each label.
    """

    replay: Replay
    labels: Mapping[str, int]
    parts: Tensor

    def of(self, seen: Seen, shape: Sequence[int]) -> Tensor:
        """Return for each value the index of its part, -1 for memory that nothing has written.

        Raises:
            ValueError: the run does not show what makes these labels.
        """
        end = self.replay.end
        try:
            sources = {
                name: filled_labels(seen.shapes[name], n) for name, n in self.labels.items()
            }
            labels = self.replay.run(sources, seen).to(torch.int64)
        except UNFOLLOWED as error:
            raise ValueError(f"the parts of {end} are not known: {error}") from error
        if labels.shape != torch.Size(shape):
            sizes = f"{list(labels.shape)}, not {list(shape)}"
            raise ValueError(f"the parts of {end} have shape {sizes}")
        parts = self.parts[labels.clamp_min(FILLED)]
        return torch.where(labels == UNWRITTEN, UNWRITTEN, parts)


def output_parts(graph: Graph) -> tuple[Output, ...]:
    """Return the outputs of a network in order, each with its parts."""
    provenance = Provenance(graph)
    leaves = output_leaves(graph)
    taken = {name for name, _ in leaves}
    outputs: list[Output] = []
    for name, node_name in leaves:
        node = graph.by_name[node_name]
        is_constant = not provenance.depends[node_name]
        whole = OutputPart(name, None, node_name, is_constant=is_constant)
        is_float = node.dtype is not None and (node.is_float or node.dtype.is_complex)
        axis = sample_axis(graph, node)
        output = Output(name, node_name, is_float, (whole,), sample_axis=axis)
        what = f"the parts, rows and channels of output {name}"
        analyse = partial(_analysed, provenance, output, taken)
        analysed = or_without(what, analyse, output)
        outputs.append(analysed)
    return tuple(outputs)


def _analysed(provenance: Provenance, output: Output, taken: set[str]) -> Output:
    """Return an output with the order of its rows, its parts and its axis of channels."""
    graph = provenance.graph
    output = replace(output, order=row_order(graph, output.node))
    if graph.by_name[output.node].is_float and provenance.joined[output.node]:
        output = _with_parts(provenance, output, taken)
    if output.channel_axis is None:
        axis, are_channels = _channel_axis(provenance, output)
        output = replace(output, channel_axis=axis, has_channels=are_channels)
    return output


def sample_axis(graph: Graph, node: Node) -> int | None:
    """Return the axis of an output whose size follows the batch, or is that of a fixed batch;
    None if there is none, or several.
    """
    shape = node.shape or ()
    if has_open_batch(graph):
        return shape.index(None) if shape.count(None) == 1 else None
    batch = fixed_batch(graph)
    return 0 if batch is not None and shape[:1] == (batch,) else None


@dataclass(frozen=True)
class _Group:
    """The labels that one part stands for, the node of each, and where the part is."""

    labels: list[int]
    sources: list[str]
    place: PartRange | None


def _with_parts(provenance: Provenance, output: Output, taken: set[str]) -> Output:
    """Return an output with its parts, itself if there is one part.

    If all parts are along one axis, that is its `channel_axis`.

    Args:
        provenance: of the graph.
        output: as a whole.
        taken: the names of all outputs and parts so far; those of these parts are added.
    """
    graph = provenance.graph
    sources, carriers = provenance.sources(output.node)
    replay = Replay(graph, output.node, sources, carriers)
    labels: dict[str, int] = {}
    makers = {FILLED: ""}
    for number, name in enumerate(sources, 1):
        is_unwritten = provenance.maker(name).row.unwritten
        labels[name] = UNWRITTEN if is_unwritten else number
        if not is_unwritten:
            makers[number] = name
    places = _places(graph, replay, labels)
    if places is not None:
        makers = {label: makers[label] for label in _in_order(makers, places)}
    elif not any(_fills(node) for node in replay.nodes):
        del makers[FILLED]
    groups = _pooled(provenance, makers, places or {})
    if len(groups) < 2:
        return output
    numbers = torch.full((1 + len(sources),), UNWRITTEN)
    for number, group in enumerate(groups):
        numbers[group.labels] = number
    axes: set[int] = set()
    for place in (places or {}).values():
        if place is not None:
            axes.add(place.axis)
    axis = axes.pop() if len(axes) == 1 else None
    parts = _named(provenance, output.name, groups, taken)
    part_labels = PartLabels(replay, labels, numbers)
    return replace(output, parts=parts, labels=part_labels, channel_axis=axis)


def _in_order(makers: Mapping[int, str], places: Mapping[int, PartRange | None]) -> list[int]:
    """Return the labels that an output has by where they begin; those without a range keep
    their order behind the others.
    """

    def start(label: int) -> int:
        place = places[label]
        return _MAX_VALUES if place is None else place.start

    labels = [label for label in makers if label in places]
    return sorted(labels, key=start)


def _fills(node: Node) -> bool:
    """Return whether a node writes a number, or pads."""
    return "pad" in node.attrs or any(key in node.attrs for key in node.row.joins)


def _pooled(
    provenance: Provenance, makers: Mapping[int, str], places: Mapping[int, PartRange | None]
) -> list[_Group]:
    """Return a group for each label, or for each layer if there are more than `MAX_PARTS`
    labels. The last group contains all that are left.
    """
    by_layer: dict[str | int, list[int]] = {}
    for label, name in makers.items():
        layer: str | int = label
        if len(makers) > MAX_PARTS:
            layer = provenance.maker(name).name if name else ""
        by_layer.setdefault(layer, []).append(label)
    pooled = list(by_layer.values())
    while len(pooled) > MAX_PARTS:
        last = pooled.pop()
        pooled[-1] += last
    groups: list[_Group] = []
    for labels in pooled:
        place = places.get(labels[0]) if len(labels) == 1 else None
        groups.append(_Group(labels, [makers[label] for label in labels], place))
    return groups


def _named(
    provenance: Provenance, output: str, groups: Sequence[_Group], taken: set[str]
) -> tuple[OutputPart, ...]:
    """Return the parts of an output by unique names, and add these to `taken`."""
    layers: list[Node | None] = []
    indices: list[str | None] = []
    for group in groups:
        source = group.sources[0]
        layer = provenance.maker(source) if source else None
        layers.append(layer)
        index = None
        if group.place is not None:
            index = f"{output}[{group.place.start}:{group.place.stop}]"
        indices.append(index)
    names = [f"{output}.{name}" for name in unique_names(layers)]
    counts = Counter(names)
    for number, index in enumerate(indices):
        if counts[names[number]] > 1 and index is not None:
            names[number] = index
    if len(groups) == MAX_PARTS and len(groups[-1].labels) > 1:
        names[-1] = f"{output}.{OTHERS}"
    parts: list[OutputPart] = []
    for number, name in enumerate(unused_names(names, taken)):
        group = groups[number]
        depends = [provenance.depends[source] for source in group.sources if source]
        part = OutputPart(
            name,
            indices[number],
            group.sources[0],
            is_constant=not any(depends),
            pooled=len(group.labels),
            place=group.place,
        )
        parts.append(part)
        taken.add(name)
    return tuple(parts)


def _places(
    graph: Graph, replay: Replay, labels: Mapping[str, int]
) -> dict[int, PartRange | None] | None:
    """Return the labels that an output has, each with its range; None if only a run can
    show it.
    """
    node = graph.by_name[replay.end]
    shapes = _shapes(graph, replay)
    if shapes is None or shapes[node.name].numel() > _MAX_VALUES:
        return None
    sources = {name: filled_labels(shapes[name], label) for name, label in labels.items()}
    try:
        label_tensor = replay.run(sources, Seen(shapes, ExampleValues(graph)))
    except UNFOLLOWED:
        return None
    axes: list[int] = []
    for axis, size in enumerate(node.shape or ()):
        if size is not None and axis not in node.open_axes:
            axes.append(axis)
    places: dict[int, PartRange | None] = {}
    for label in label_tensor.unique().tolist():
        if label != UNWRITTEN:
            places[int(label)] = _range(label_tensor == label, axes)
    return places


def _shapes(graph: Graph, replay: Replay) -> dict[str, torch.Size] | None:
    """Return the shapes that a replay needs and that of its end, None if the graph does not
    know one of them.
    """
    shapes: dict[str, torch.Size] = {}
    for name in (*replay.shaped, replay.end):
        shape = example_shape(graph.by_name[name])
        if shape is None:
            return None
        shapes[name] = shape
    return shapes


def _range(is_part: Tensor, axes: Sequence[int]) -> PartRange | None:
    """Return the range of one of these axes that is exactly where a mask is true."""
    for axis in axes:
        rows = is_part.movedim(axis, 0).reshape(is_part.shape[axis], -1)
        inside = rows.all(1)
        places = inside.nonzero().flatten().tolist()
        if not places or not torch.equal(inside, rows.any(1)):
            continue
        first, stop = places[0], places[-1] + 1
        if len(places) == stop - first:
            return PartRange(axis, first, stop)
    return None


def _channel_axis(provenance: Provenance, output: Output) -> tuple[int | None, bool]:
    """Return the axis of an output's channels, and whether they are those of a layer.

    It is the axis of the layer that makes the output, followed through moves. If that is not
    known, it is the second axis.
    """
    graph = provenance.graph
    rank = graph.by_name[output.node].rank
    maker = provenance.maker(output.node)
    channels = maker.row.channels
    if rank < 2:
        return None, False
    if channels is None:
        return 1, False
    if maker.name == output.node:
        return channels % rank, True
    carriers: dict[str, str] = {}
    name = output.node
    while name != maker.name:
        node = graph.by_name[name]
        operand = provenance.before(node)
        assert operand is not None  # the maker is before it
        if provenance.carrier(node) is not None:
            carriers[name] = operand
        name = operand
    replay = Replay(graph, output.node, [maker.name], carriers)
    shapes = _shapes(graph, replay)
    if shapes is None or not 0 < shapes[output.node].numel() <= _MAX_VALUES:
        return 1, False
    shape = shapes[maker.name]
    sources = {maker.name: numbered_labels(shape, channels)}
    try:
        labels = replay.run(sources, Seen(shapes, ExampleValues(graph)))
    except UNFOLLOWED:
        return 1, False
    axes = changing_axes(compress_labels(labels))
    if len(axes) != 1:
        return 1, False
    # Positions may have joined the channels, as where a map becomes a vector
    return axes[0], shapes[output.node][axes[0]] == shape[channels]


def parts_named_as(graph: Graph, original: Graph) -> tuple[Output, ...]:
    """Return the outputs of a graph that passes have made of `original`, with the names that
    this gives them.

    Where an output has other parts after the passes, these keep the names of `graph`.
    """
    outputs = output_parts(graph)
    if graph is original:
        return outputs
    renamed: list[Output] = []
    for output, first in zip(outputs, output_parts(original), strict=True):
        parts = list(output.parts)
        if len(parts) == len(first.parts):
            for number, part in enumerate(first.parts):
                parts[number] = replace(parts[number], name=part.name, index=part.index)
        renamed.append(replace(output, name=first.name, parts=tuple(parts)))
    return tuple(renamed)
