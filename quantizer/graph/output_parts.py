"""The outputs of a network and the parts of each that different layers make: their names,
and which value is whose.

A part ends where something is computed of several values at once: a product, a sum, a choice by
`topk`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node
from quantizer.graph.label_replay import (
    FILLED,
    UNWRITTEN,
    ExampleValues,
    Replay,
    Seen,
    filled,
    shape_in,
)
from quantizer.graph.output_names import OTHERS, numbered, output_leaves, unique_names
from quantizer.graph.provenance import Provenance
from quantizer.graph.row_order import RowOrder, row_order

MOST = 32
"""Parts of an output that have names of their own; the last of more is the pool of all that
is left."""
LARGEST = 1 << 24
"""Values of an output of which the places of parts are looked for, before there is a run."""
_NOT_RUN = (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError)


@dataclass(frozen=True)
class Range:
    """Where a part lies, if it is all of an output between two indices of one axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
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
    place: Range | None = None


@dataclass(frozen=True)
class Output:
    """A tensor that a network returns.

    Attributes:
        name: as the model calls it.
        node: what makes it.
        is_float: whether it is a floating-point tensor, or a complex one.
        parts: at least one, which has the output's name if it is the only one.
        labels: gives the part of each value; None if there is one part.
        channel_axis: the axis of its channels, if it has any.
        order: what puts its rows in an order that depends on values; None if nothing does.
    """

    name: str
    node: str
    is_float: bool
    parts: tuple[Part, ...]
    labels: PartLabels | None = None
    channel_axis: int | None = None
    order: RowOrder | None = None

    @property
    def watched(self) -> frozenset[str]:
        """The nodes of which a run has to keep shape or values."""
        names: set[str] = set()
        if self.labels is not None:
            names |= self.labels.replay.shaped | self.labels.replay.steering
        if self.order is not None:
            names |= self.order.watched
        return frozenset(names)


@dataclass(frozen=True)
class PartLabels:
    """Which part each value of an output belongs to. `parts` has the number of the part of
    each label."""

    replay: Replay
    labels: Mapping[str, int]
    parts: Tensor

    def of(self, seen: Seen, shape: Sequence[int]) -> Tensor:
        """Return for each value the index of its part, -1 for memory that nothing has written.

        Raises:
            ValueError: the run does not show what makes these labels.
        """
        try:
            labels = self._run(seen)
        except _NOT_RUN as error:
            why = f"the parts of {self.replay.end} are not known: {error}"
            raise ValueError(why) from error
        if labels.shape != torch.Size(shape):
            sizes = f"{list(labels.shape)}, not {list(shape)}"
            raise ValueError(f"the parts of {self.replay.end} have shape {sizes}")
        return labels

    def _run(self, seen: Seen) -> Tensor:
        sources: dict[str, Tensor] = {}
        for name, label in self.labels.items():
            sources[name] = filled(seen.shapes[name], label)
        labels: Tensor = self.replay.run(sources, seen)
        numbers = labels.to(torch.int64)
        parts: Tensor = self.parts[numbers.clamp_min(FILLED)]
        return torch.where(numbers == UNWRITTEN, UNWRITTEN, parts)


def output_parts(graph: Graph) -> tuple[Output, ...]:
    """Return the outputs of a network in order, each with the parts that joins and writes
    make of it."""
    provenance = Provenance(graph)
    leaves = output_leaves(graph)
    taken = {name for name, _ in leaves}
    outputs: list[Output] = []
    for name, node_name in leaves:
        node = graph.by_name[node_name]
        whole = Part(name, None, node_name, is_constant=not provenance.depends[node_name])
        order = row_order(graph, node_name)
        is_float = node.dtype is not None and (node.is_float or node.dtype.is_complex)
        output = Output(name, node_name, is_float, (whole,), order=order)
        axis: int | None = None
        if node.is_float and provenance.joined[node_name]:
            output, axis = _with_parts(graph, provenance, output, taken)
        if axis is None:
            axis = _channel_axis(graph, provenance, output)
        outputs.append(replace(output, channel_axis=axis))
    return tuple(outputs)


def _with_parts(
    graph: Graph,
    provenance: Provenance,
    output: Output,
    taken: set[str],
) -> tuple[Output, int | None]:
    """Return an output with its parts, itself if there is but one; and the axis along which
    they lie, if it is one."""
    sources, carriers = provenance.sources(output.node)
    replay = Replay(graph, output.node, sources, carriers)
    labels: dict[str, int] = {}
    for name in sources:
        labels[name] = UNWRITTEN if provenance.maker(name).row.unwritten else 1 + len(labels)
    makers = {FILLED: ""}
    for name, label in labels.items():
        if label != UNWRITTEN:
            makers[label] = name
    places = _places(graph, replay, labels)
    if places is not None:
        makers = {label: name for label, name in makers.items() if label in places}
        makers = dict(sorted(makers.items(), key=lambda item: _start(places[item[0]])))
    elif not any(_fills(node) for node in replay.nodes):
        del makers[FILLED]
    groups = _pooled(provenance, makers)
    if len(groups) < 2:
        return output, None
    parts = _named(provenance, output, groups, makers, places or {}, taken)
    numbers = torch.full((1 + max((FILLED, *labels.values())),), UNWRITTEN)
    for number, group in enumerate(groups):
        numbers[list(group)] = number
    axes = {place.axis for place in (places or {}).values() if place is not None}
    axis = axes.pop() if len(axes) == 1 else None
    return replace(output, parts=parts, labels=PartLabels(replay, labels, numbers)), axis


def _start(place: Range | None) -> int:
    """Return where a part begins; those without a range keep their order behind the others."""
    return LARGEST if place is None else place.start


def _fills(node: Node) -> bool:
    """Return whether a node writes a number, or pads."""
    return any(key in node.attrs for key in node.row.joins) or "pad" in node.attrs


def _pooled(provenance: Provenance, makers: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Return the labels of each part: one, but for more than `MOST` those of one layer, and
    those that are left."""
    if len(makers) <= MOST:
        return [(label,) for label in makers]
    groups: dict[str, list[int]] = {}
    for label, name in makers.items():
        layer = provenance.maker(name).name if name else ""
        groups.setdefault(layer, []).append(label)
    pooled = list(groups.values())
    if len(pooled) > MOST:
        others = [label for group in pooled[MOST - 1 :] for label in group]
        pooled = [*pooled[: MOST - 1], others]
    return [tuple(group) for group in pooled]


def _named(
    provenance: Provenance,
    output: Output,
    groups: Sequence[tuple[int, ...]],
    makers: Mapping[int, str],
    places: Mapping[int, Range | None],
    taken: set[str],
) -> tuple[Part, ...]:
    """Return the parts of an output by unique names; `taken` gains them."""
    indices: list[str | None] = []
    ranges: list[Range | None] = []
    layers: list[Node | None] = []
    for group in groups:
        place = places.get(group[0]) if len(group) == 1 else None
        ranges.append(place)
        indices.append(None if place is None else f"{output.name}[{place.start}:{place.stop}]")
        layers.append(provenance.maker(makers[group[0]]) if makers[group[0]] else None)
    names = [f"{output.name}.{name}" for name in unique_names(layers)]
    counts = Counter(names)
    for number, index in enumerate(indices):
        if counts[names[number]] > 1 and index is not None:
            names[number] = index
    is_rest = len(groups) == MOST and len(groups[-1]) > 1
    if is_rest:
        names[-1] = f"{output.name}.{OTHERS}"
    parts: list[Part] = []
    for number, (name, group) in enumerate(zip(numbered(names, taken), groups, strict=True)):
        sources = [makers[label] for label in group]
        is_constant = not any(source and provenance.depends[source] for source in sources)
        index, place = indices[number], ranges[number]
        parts.append(Part(name, index, sources[0], is_constant, len(group), place))
        taken.add(name)
    return tuple(parts)


def _places(
    graph: Graph,
    replay: Replay,
    labels: Mapping[str, int],
) -> dict[int, Range | None] | None:
    """Return the labels that an output has, each with its range; None if only a run can
    tell."""
    node = graph.by_name[replay.end]
    shapes = _shapes(graph, replay)
    if shapes is None or torch.Size(shapes[node.name]).numel() > LARGEST:
        return None
    sources = {name: filled(shapes[name], label) for name, label in labels.items()}
    try:
        label_tensor = replay.run(sources, Seen(shapes, ExampleValues(graph)))
    except _NOT_RUN:
        return None
    sizes = node.shape or ()
    fixed = (axis for axis, size in enumerate(sizes) if size is not None)
    axes = [axis for axis in fixed if axis not in node.open_axes]
    places: dict[int, Range | None] = {}
    for label in label_tensor.unique().tolist():
        if label != UNWRITTEN:
            places[int(label)] = _range(label_tensor == label, axes)
    return places


def _shapes(graph: Graph, replay: Replay) -> dict[str, torch.Size] | None:
    """Return the shapes that a replay needs, and that of its end, as the graph knows them;
    None if one is not known."""
    shapes: dict[str, torch.Size] = {}
    for name in (*replay.shaped, replay.end):
        shape = shape_in(graph, name)
        if shape is None:
            return None
        shapes[name] = shape
    return shapes


def _range(is_part: Tensor, axes: Sequence[int]) -> Range | None:
    """Return the range of one of these axes that is exactly where a mask is true."""
    for axis in axes:
        rows = is_part.movedim(axis, 0).flatten(1)
        inside = rows.all(1)
        places = inside.nonzero().flatten().tolist()
        is_whole = torch.equal(inside, rows.any(1))
        if is_whole and places and places == list(range(places[0], places[-1] + 1)):
            return Range(axis, places[0], places[-1] + 1)
    return None


def _channel_axis(graph: Graph, provenance: Provenance, output: Output) -> int | None:
    """Return the axis of an output's channels: where those of the layer are that makes it,
    else the second."""
    rank = graph.by_name[output.node].rank
    if rank < 3:
        return 1 if rank == 2 else None
    maker = provenance.maker(output.node)
    if maker.name == output.node:
        return 1 if maker.row.channels is None else maker.row.channels % rank
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
    if maker.row.channels is None or shapes is None:
        return 1
    if not 0 < torch.Size(shapes[output.node]).numel() <= LARGEST:
        return 1
    shape = shapes[maker.name]
    view = [1] * len(shape)
    view[maker.row.channels] = shape[maker.row.channels]
    channels = torch.arange(max(view), dtype=torch.float32).view(view).expand(shape)
    try:
        label_tensor = replay.run({maker.name: channels}, Seen(shapes, ExampleValues(graph)))
    except _NOT_RUN:
        return 1
    axes: list[int] = []
    for axis in range(rank):
        first = label_tensor.narrow(axis, 0, 1).expand(label_tensor.shape)
        if not torch.equal(label_tensor, first):
            axes.append(axis)
    return axes[0] if len(axes) == 1 else 1


def parts_named_as(graph: Graph, original: Graph) -> tuple[Output, ...]:
    """Return the outputs of a graph that passes have made of `original`, with the names that
    this gives them.

    Where passes leave an output other parts, these keep the names that they have in `graph`.
    """
    if graph is original:
        return output_parts(graph)
    renamed: list[Output] = []
    for output, first in zip(output_parts(graph), output_parts(original), strict=True):
        parts = output.parts
        if len(parts) == len(first.parts):
            names = [(part.name, part.index) for part in first.parts]
            pairs = zip(parts, names, strict=True)
            parts = tuple(
                replace(part, name=name, index=index) for part, (name, index) in pairs
            )
        renamed.append(replace(output, name=first.name, parts=parts))
    return tuple(renamed)
