"""Finds the heads between the layer that makes an attention's values and the layer that reads its result."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.graph.axis_rules import ATTENTION, MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.structure import InputGroup

_ATTENTIONS = (ATTENTION, MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT)
"""Rules of operators that end an attention: the last argument that they name has the values."""


@dataclass(frozen=True)
class Heads:
    """`rows` are the outputs of `maker` that each head of `width` channels takes, one entry for heads that share."""

    maker: str
    width: int
    rows: tuple[tuple[int, ...], ...]


def heads(graph: Graph, group: InputGroup) -> Heads | None:
    """The heads of the value that a group reads, where between it and its maker there are moves and one attention.

    Any other operator, such as a gate, works on single channels, which a rotation would mix.
    """
    fold = group.fold
    if fold is None or graph.by_name[fold.node].row.spatial != 0 or fold.extra:
        return None
    attention = _source(graph, graph.by_name[group.source])
    axes = attention.row.axes if attention is not None else None
    if attention is None or axes is None or axes not in _ATTENTIONS:
        return None
    values = attention.inputs.get(axes.arguments[-1])
    if not isinstance(values, Ref) or not attention.shape:
        return None
    maker, width = _source(graph, graph.by_name[values.name]), attention.shape[-1]
    if maker is None or maker.name != fold.node or not width or group.channels % width:
        return None
    channels = fold.channels or tuple(range(group.channels))
    blocks = dict.fromkeys(channels[at : at + width] for at in range(0, group.channels, width))
    apart = len({row for block in blocks for row in block}) == len(blocks) * width
    return Heads(maker.name, width, tuple(blocks)) if apart else None


def _source(graph: Graph, node: Node | None) -> Node | None:
    """What made the values that operators before this one only moved."""
    while node is not None and node.row.only_moves:
        node = graph.source(node)
    return node
