"""The parts of an output that come from several layers, found by labels that run to it.
Also where the channels of a layer are in an output that moves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.graph.channels.labels import (
    UNFOLLOWED,
    changing_axes,
    compress_labels,
    example_shape,
    filled_labels,
    numbered_labels,
)
from quantizer.graph.channels.provenance import OutputPart, PartRange, Provenance, Seen
from quantizer.graph.channels.replay import FILLED, UNWRITTEN, ExampleValues, Replay
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import last_part
from quantizer.graph.output_names import unused_names

_CONSTANT = "constant"
"""The name of a part that is filled in."""
OTHERS = "others"
"""The name of the parts of an output beyond those that have names."""
MAX_PARTS = 32
"""Parts of an output that have names of their own. If there are more, the last one is the pool
of all others.
"""
_MAX_VALUES = 1 << 24
"""The largest output of which the ranges of parts are searched before there is a run."""


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


@dataclass(frozen=True)
class _Group:
    """The labels that one part stands for, the node of each, and where the part is."""

    labels: list[int]
    sources: list[str]
    place: PartRange | None


def joined_parts(
    provenance: Provenance, name: str, end: str, taken: set[str]
) -> tuple[tuple[OutputPart, ...], PartLabels, int | None] | None:
    """Return the parts of an output, what finds them, and the axis if all are along one; None
    if there is one part.

    Args:
        provenance: of the graph.
        name: of the output.
        end: the node that makes it.
        taken: the names of all outputs and parts so far; those of these parts are added.
    """
    graph = provenance.graph
    sources, carriers = provenance.sources(end)
    replay = Replay(graph, end, sources, carriers)
    labels: dict[str, int] = {}
    makers = {FILLED: ""}
    for number, source in enumerate(sources, 1):
        is_unwritten = provenance.maker(source).row.unwritten
        labels[source] = UNWRITTEN if is_unwritten else number
        if not is_unwritten:
            makers[number] = source
    places = _places(graph, replay, labels)
    if places is not None:
        makers = {label: makers[label] for label in _in_order(makers, places)}
    elif not any(_fills(node) for node in replay.nodes):
        del makers[FILLED]
    groups = _pooled(provenance, makers, places or {})
    if len(groups) < 2:
        return None
    numbers = torch.full((1 + len(sources),), UNWRITTEN)
    for number, group in enumerate(groups):
        numbers[group.labels] = number
    axes: set[int] = set()
    for place in (places or {}).values():
        if place is not None:
            axes.add(place.axis)
    axis = axes.pop() if len(axes) == 1 else None
    parts = _named(provenance, name, groups, taken)
    return parts, PartLabels(replay, labels, numbers), axis


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


def moved_channels(
    provenance: Provenance, end: str, maker: Node, channels: int
) -> tuple[int | None, bool]:
    """Return the axis at which an output has the channels of a layer that it moves, and whether
    it has them whole. If the axis is not known, it is the second one.

    Args:
        provenance: of the graph.
        end: the node that makes the output.
        maker: the layer.
        channels: the axis of the layer's own channels.
    """
    graph = provenance.graph
    carriers: dict[str, str] = {}
    name = end
    while name != maker.name:
        node = graph.by_name[name]
        operand = provenance.before(node)
        assert operand is not None  # the maker is before it
        if provenance.carrier(node) is not None:
            carriers[name] = operand
        name = operand
    replay = Replay(graph, end, [maker.name], carriers)
    shapes = _shapes(graph, replay)
    if shapes is None or not 0 < shapes[end].numel() <= _MAX_VALUES:
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
    return axes[0], shapes[end][axes[0]] == shape[channels]


def short_names(node: Node) -> list[str]:
    """Return what a part may be called that a node makes, the shortest name first.

    >>> node = Node("Net::Net/conv2d.1", "conv2d", "aten.conv2d.default", scope="head.boxes.0")
    >>> short_names(node)
    ['boxes', 'boxes.0', 'head.boxes.0', 'head.boxes.0.conv2d']
    """
    operator = last_part(node.name).partition(".")[0]
    is_tensor = not node.inputs and "weight" in node.params
    path = node.params["weight"] if is_tensor else node.scope
    if not path:
        return [operator]
    words = path.split(".")
    start = len(words) - 1
    while start and words[start].isdecimal():
        start -= 1
    names = [words[start], ".".join(words[start:]), path]
    if not is_tensor:
        names.append(f"{path}.{operator}")
    return list(dict.fromkeys(names))


def unique_names(makers: Sequence[Node | None]) -> list[str]:
    """Return a name for each part of an output: the shortest that distinguishes its maker from
    the others.

    Parts of one maker, or of several calls of one, have the same name.

    Args:
        makers: what makes each part, None for what is filled in.
    """
    choices: list[tuple[str, ...]] = []
    for maker in makers:
        names_of_maker = [_CONSTANT] if maker is None else short_names(maker)
        choices.append(tuple(names_of_maker))
    levels = dict.fromkeys(choices, 0)
    while True:
        names = {choice: choice[level] for choice, level in levels.items()}
        counts = Counter(names.values())
        longer: list[tuple[str, ...]] = []
        for choice, name in names.items():
            if counts[name] > 1 and levels[choice] + 1 < len(choice):
                longer.append(choice)
        if not longer:
            return [names[choice] for choice in choices]
        for choice in longer:
            levels[choice] += 1
