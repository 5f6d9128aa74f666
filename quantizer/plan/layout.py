"""The layout of a graph: which values share one quantization, and where."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantizer.graph.ir import Graph

if TYPE_CHECKING:
    from quantizer.graph.channels.origins import Origins, Runs


@dataclass(frozen=True)
class Group:
    """Layers whose values are quantized once, at `point`. The config may name any of
    `members`.
    """

    point: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Multiplication:
    """A layer that multiplies `value`, whose parts may have different scales."""

    layer: str
    value: str


@dataclass(frozen=True)
class Join:
    """Values of several layers in one tensor, each quantized where it is computed, or all of
    them at `group.point`.

    Attributes:
        name: the layer that joins them.
        group: it, and the activation function or the scaling after it, if nothing else reads
            the values before these.
        alone: the parts that only this join reads, as groups of their own.
        products: the layers that multiply several parts at once, and so need one scale for
            them.
        is_returned: whether the network returns some of it.
        is_single: whether the config asks to quantize all parts at `group.point`.
    """

    name: str
    group: Group
    alone: tuple[Group, ...]
    products: tuple[Multiplication, ...]
    is_returned: bool
    is_single: bool = False


@dataclass(frozen=True)
class Layout:
    """The places where a graph's floating-point values are quantized.

    Attributes:
        groups: the values that are quantized together, by the layer where they are.
        served: the layer that quantizes another's output.
        unneeded: the layers whose output no layer has to quantize.
        floats: the layers that need no quantization, and why.
        origins: the parts of each joined value.
        joins: the joins that are read by something else than another join, by name.
        arguments: the layers that stay float as arguments and are multiplied as well, with the
            products that quantize them at their inputs.
        runs: the places of the parts of joins in values that are computed from them.
        apart: those of `runs` of which no reader, direct or indirect, needs one scale for all
            parts.
        blends: the values that are computed from parts and then multiplied, by the layer where
            they are quantized. They are like joins whose parts cannot be quantized before.
    """

    groups: dict[str, Group]
    served: dict[str, str]
    unneeded: set[str] = field(default_factory=set)
    floats: dict[str, str] = field(default_factory=dict)
    origins: dict[str, Origins] = field(default_factory=dict)
    joins: dict[str, Join] = field(default_factory=dict)
    arguments: dict[str, tuple[Multiplication, ...]] = field(default_factory=dict)
    runs: dict[str, Runs] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    blends: dict[str, Join] = field(default_factory=dict)


class _Everything(Container[str]):
    """A container that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


PART_SCALE = "input_scale"
"""The operator that brings the parts of a join to one range, so that they can share a scale."""
EVERY_JOIN: Container[str] = _Everything()
"""For devices with one scale for all values of a tensor."""


def quantization_point(graph: Graph, where: Layout, name: str) -> str | None:
    """Return the layer at which a node's values are quantized, or None if its parts have
    different scales or none.

    It is the point of the node's group, or that of the values that it moves.
    """
    node = graph.by_name[name]
    if name in where.groups:
        return name
    if name in where.served:
        return quantization_point(graph, where, where.served[name])
    if node.row.keeps_scale:
        point = quantization_point(graph, where, next(node.refs()))
        if point is not None:
            return point
    origins = where.origins.get(name)
    if origins is None or origins.constants:
        return None
    points = {quantization_point(graph, where, source) for source in origins.sources}
    return points.pop() if len(points) == 1 else None
