"""Finds the heads between the layer that makes an attention's values and the layer that reads its result."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.algorithms.axis_rules import input_of, is_move
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.structure import InputGroup

_VALUES = {"scaled_dot_product_attention": "value", "matmul": "other", "bmm": "mat2"}


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
    if fold is None or fold.kind != "layer" or graph.by_name[fold.node].op != "linear" or fold.extra:
        return None
    attention = _source(graph, graph.by_name[group.source])
    values = attention.inputs.get(_VALUES.get(attention.op, "")) if attention is not None else None
    if attention is None or not isinstance(values, Ref) or not attention.shape:
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
    while node is not None and (is_move(node) or node.op in ("split", "chunk", "getitem", "repeat_interleave")):
        node = input_of(graph, node)
    return node
