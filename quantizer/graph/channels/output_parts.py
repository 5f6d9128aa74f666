"""The outputs of a network, and their parts, which different layers make: names, and the part
of each value.

A part ends where something is computed from several values at once: a product, a sum, a choice
by `topk`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from quantizer.errors import or_without
from quantizer.graph.channels.provenance import OutputPart, Provenance
from quantizer.graph.ir import Graph, Node
from quantizer.graph.output_names import output_leaves
from quantizer.graph.tracing.batch_axes import fixed_batch, has_open_batch

if TYPE_CHECKING:
    from quantizer.graph.channels.joined_parts import PartLabels
    from quantizer.graph.channels.row_order import RowOrder


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
    if any(node.row.orders for node in graph.nodes):
        from quantizer.graph.channels.row_order import row_order

        output = replace(output, order=row_order(graph, output.node))
    if graph.by_name[output.node].is_float and provenance.joined[output.node]:
        from quantizer.graph.channels.joined_parts import joined_parts

        found = joined_parts(provenance, output.name, output.node, taken)
        if found is not None:
            parts, labels, axis = found
            output = replace(output, parts=parts, labels=labels, channel_axis=axis)
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
    from quantizer.graph.channels.joined_parts import moved_channels

    return moved_channels(provenance, output.node, maker, channels)


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
