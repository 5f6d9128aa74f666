"""Finds the layers that multiply values computed of inputs alone, and the channels that they
read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantizer.config.wording import first_names
from quantizer.graph.channel_labels import ChannelLabels
from quantizer.graph.edits import channels_of, input_weights
from quantizer.graph.ir import Graph
from quantizer.graph.structure import InputGroup
from quantizer.plan.floating import input_values

_MAX_NAMED = 8
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


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
        sizes = [size or 1 for size in (source.shape or ())[1:]]
        positions = math.prod(sizes) // group.channels
        rows.append(InputReaders(group, name, max(1, positions)))
    return rows


def _groups(graph: Graph, names: set[str]) -> list[InputGroup]:
    """Return the linear, convolution and recurrent layers that read some values, grouped by the
    value and the axis of its channels.
    """
    groups: dict[tuple[str, int], InputGroup] = {}
    for node in graph.nodes:
        source = graph.source(node)
        is_recurrent = node.op in _RECURRENT
        is_layer = is_recurrent or (node.is_multiplying and not node.row.experts)
        if not is_layer or source is None or source.name not in names or not source.is_float:
            continue
        axis = -1
        channels = graph.tensors[node.params[input_weights(node)[0]]].shape[-1]
        if not is_recurrent:
            axis = node.row.channels or 0
            _, channels = channels_of(node, graph.weight(node))
        key = (source.name, axis % source.rank)
        group = groups.get(key) or InputGroup(source.name, (), axis, channels)
        groups[key] = replace(group, layers=(*group.layers, node.name))
    return list(groups.values())


def _is_of_flat_images(graph: Graph, group: InputGroup, names: set[str]) -> bool:
    """Return whether the channels are the pixels of images, which have one unit."""
    pending = [group.source]
    rank = graph.by_name[group.source].rank
    while pending:
        node = graph.by_name[pending.pop()]
        if node.op == "input" and node.rank == 4 and rank == 2:
            return True
        pending += [name for name in node.refs() if name in names]
    return False


def _input_of(graph: Graph, group: InputGroup, names: set[str]) -> str | None:
    """Return the input that has a group's channels whole and in order."""
    node = graph.by_name[group.source]
    axis: int | None = group.axis % node.rank if node.rank else None
    while node.op != "input" and axis is not None:
        operands = [name for name in node.refs() if name in names]
        if len(operands) != 1:
            return None
        source = graph.by_name[operands[0]]
        is_moved = node.row.kind == "passthrough"
        if is_moved or source.shape != node.shape:
            axis = ChannelLabels(graph).moved_back(node, axis)
        node = source
    return node.name if axis is not None else None


def channel_names(indices: Sequence[int]) -> str:
    """Return the text that names channels, as "channels 0, 2 and 3"."""
    names = [str(index) for index in indices]
    return f"channel{'s' * (len(names) > 1)} {first_names(names, _MAX_NAMED)}"
