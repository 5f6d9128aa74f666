"""Find what reads a node's values, directly or through moves and joins. Also how far from zero
values still matter to their readers, and which layers multiply values of inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantizer.config.model import QuantizationSpec
from quantizer.config.wording import first_names
from quantizer.graph.edits import channels_of, input_weights, is_recurrent_layer
from quantizer.graph.ir import Graph, Node, readers
from quantizer.plan.floating import MASK, ancestors, input_values
from quantizer.plan.mask_constants import chooses

if TYPE_CHECKING:
    from quantizer.graph.structure.definitions import InputGroup

Reading = tuple[str, str]
"""A reader, "" for the network's output, and the node that it reads."""
_MOST_BITS = 8
_MAX_NAMED = 8


def values_readers(graph: Graph, name: str, floats: Mapping[str, str]) -> Iterator[Reading]:
    """Return what reads a node's values, directly or through moves.

    Mask constants end at a choice among values, so there a choice is a reader.
    """

    def ends(move: Node, read: str) -> bool:
        return floats.get(read) == MASK and chooses(move)

    return readers(graph, name, ends)


def outer_readers(
    graph: Graph, name: str, floats: Mapping[str, str] | None = None
) -> Iterator[Reading]:
    """Yield what reads a node's values, directly or through moves and joins.

    Args:
        floats: of the layout. With it mask constants end at a choice.
    """
    pending = [name]
    joins = {name}
    while pending:
        for reader, source in values_readers(graph, pending.pop(), floats or {}):
            if not reader or not graph.by_name[reader].is_join:
                yield reader, source
            elif reader not in joins:
                joins.add(reader)
                pending.append(reader)


def useful_magnitude(graph: Graph, source: str, spec: QuantizationSpec) -> float | None:
    """Return the magnitude beyond which all readers of a node saturate; None if some reader
    does not.

    With a power-of-two scale, the values beyond it would cost all others a bit or two. Other
    scales lose less, so they have no such limit. Wider codes have room for all values.
    """
    is_short = spec.dtype == "int" and spec.bit_width <= _MOST_BITS
    if not is_short or spec.scale_type != "poweroftwo":
        return None
    magnitudes = []
    for reader, _ in outer_readers(graph, source):
        # "" is the network's output
        row = graph.by_name[reader].row if reader else None
        if row is None or row.saturates is None:
            return None
        magnitudes.append(row.saturates)
    return max(magnitudes, default=None)


@dataclass(frozen=True)
class InputReaders:
    """Layers that multiply one value, which is computed of inputs alone.

    Args:
        group: the layers, the value that they read, and the axis and number of its channels.
        name: the input whose channels these are; None if they come from several inputs, or in
            another order.
        positions: how many values of each channel a sample has.
    """

    group: InputGroup
    name: str | None
    positions: int

    def channels_text(self, channels: str) -> str:
        """Return the text about some channels with where they are."""
        if self.name is not None:
            return f"{channels} of {self.name}"
        return f"{channels} of what {self.group.layers[0]} reads"


def input_readers(graph: Graph, *, with_sums: bool = False) -> list[InputReaders]:
    """Return the layers that multiply several channels of the `input_values` of a graph."""
    names = input_values(graph, with_sums=with_sums)
    if not names:
        return []
    rows = []
    for group in _groups(graph, names):
        source = graph.by_name[group.source]
        if group.channels < 2 or _is_of_flat_images(graph, group, names):
            continue
        name = _input_of(graph, group, names)
        positions = _positions(source, group.channels)
        row = InputReaders(group, name, positions)
        rows.append(row)
    return rows


def _positions(source: Node, channels: int) -> int:
    """Return how many values of each channel a sample has; open sizes count as 1."""
    shape = source.shape or ()
    sizes = []
    for size in shape[1:]:
        sizes.append(size or 1)
    positions = math.prod(sizes) // channels
    return max(1, positions)


def _groups(graph: Graph, names: set[str]) -> list[InputGroup]:
    """Return the linear, convolution and recurrent layers that read some values, grouped by the
    value and the axis of its channels.
    """
    from quantizer.graph.structure.definitions import InputGroup

    groups: dict[tuple[str, int], InputGroup] = {}
    for node in graph.nodes:
        source = graph.source(node)
        if source is None or source.name not in names or not source.is_float:
            continue
        if is_recurrent_layer(node):
            axis = -1
            first_key = input_weights(node)[0]
            weight = graph.tensors[node.params[first_key]]
            channels = weight.shape[-1]
        elif node.is_multiplying and not node.row.experts:
            axis = node.row.channels or 0
            weight = graph.weight(node)
            _, channels = channels_of(node, weight)
        else:
            continue
        key = (source.name, axis % source.rank)
        new = InputGroup(source.name, (), axis, channels)
        group = groups.get(key, new)
        layers = (*group.layers, node.name)
        groups[key] = replace(group, layers=layers)
    return list(groups.values())


def _is_of_flat_images(graph: Graph, group: InputGroup, names: set[str]) -> bool:
    """Return whether the channels are the pixels of images, which have one unit."""
    if graph.by_name[group.source].rank != 2:
        return False
    nodes = [graph.by_name[name] for name in ancestors(graph, [group.source], names)]
    return any(node.op == "input" and node.rank == 4 for node in nodes)


def _input_of(graph: Graph, group: InputGroup, names: set[str]) -> str | None:
    """Return the input that has a group's channels whole and in order."""
    node = graph.by_name[group.source]
    axis: int | None = None
    if node.rank:
        axis = group.axis % node.rank
    while node.op != "input" and axis is not None:
        operands = []
        for name in node.refs():
            if name in names:
                operands.append(name)
        if len(operands) != 1:
            return None
        source = graph.by_name[operands[0]]
        is_moved = node.row.kind == "passthrough"
        if is_moved or source.shape != node.shape:
            from quantizer.graph.channels.labels import moved_back

            axis = moved_back(graph, node, axis)
        node = source
    return node.name if axis is not None else None


def channel_names(indices: Sequence[int]) -> str:
    """Return the text that names channels, as "channels 0, 2 and 3"."""
    names = []
    for index in indices:
        names.append(str(index))
    noun = "channel" if len(names) == 1 else "channels"
    return f"{noun} {first_names(names, _MAX_NAMED)}"
