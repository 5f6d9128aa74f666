"""Find what a rotation passes through: the values between linear layers, embeddings, additions
and norms.

The search starts at what a norm reads, and takes in all that must be rotated with it. It needs
no names and no table of architectures.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import (
    ALIKE,
    JOINED,
    PRODUCT,
    QUOTIENT,
    REDUCED,
    Commutes,
)
from quantizer.graph.channels.labels import moved, moved_back, paths
from quantizer.graph.edits import passes_shifts
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.targets import call

_NORMS = ("layer_norm", "rms_norm")
_SQUARES = ("pow", "square")
_LEAVES = ("parameter", "constant")
_ZEROS = ("zeros", "zeros_like", "new_zeros")


@dataclass(frozen=True)
class Norm:
    """Holds the affine part of a normalization.

    Attributes:
        factor: float64 [channels], by which the channels are multiplied.
        shift: float64 [channels], added to them afterwards; None for no shift.
        neutral: node, key and value of the parameters with which the norm multiplies by one and
            adds zero.
    """

    factor: Tensor
    shift: Tensor | None
    neutral: tuple[tuple[str, str, Tensor], ...]


@dataclass
class Residual:
    """Holds values that must be rotated together.

    Attributes:
        channels: the size of the axis that is rotated.
        keeps_mean: whether something takes the mean over channels, so that the rotation must
            keep the vector of ones.
        members: the axis of the channels, by node.
        readers: by linear layer that reads a member: the node of the norm before it, or None.
        writers: the axis of the channels in the output of each layer, parameter or constant
            that makes a member.
        norms: by the last node of each.
        obstacle: the first node that no rotation passes; None if there is none.
    """

    channels: int
    keeps_mean: bool = False
    members: dict[str, int] = field(default_factory=dict)
    readers: dict[str, str | None] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    obstacle: Node | None = None


def residuals(graph: Graph) -> Iterator[Residual]:
    """Yield each set of values that must be rotated together, in the order of the graph, also
    those with an obstacle.
    """
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op not in _NORMS and not _is_square(node):
            continue
        source = graph.source(node)
        if source is None or source.name in seen or not source.shape:
            continue
        channels = source.shape[-1]
        if channels is not None:
            residual = _Search(graph, channels).run(source.name, len(source.shape) - 1)
            seen |= residual.members.keys()
            yield residual


def _is_square(node: Node) -> bool:
    return node.op in _SQUARES and node.attrs.get("exponent", 2) == 2


def _leaf(graph: Graph, node: Node) -> Node | None:
    """Return the tensor of one axis from which a chain of operators computes the node's value.

    Each operator of the chain has one input, and no other operator reads from the chain.
    Return None if the value is computed otherwise.
    """
    while node.op not in _LEAVES:
        sources = list(node.refs())
        is_shared = len(graph.consumers[node.name]) != 1
        if is_shared or len(sources) != 1 or not node.target.startswith("aten."):
            return None
        node = graph.by_name[sources[0]]
    if len(graph.consumers[node.name]) != 1:
        return None
    has_one_axis = (node.shape or ())[-1:] == (graph.weight(node).numel(),)
    return node if has_one_axis else None


def _chain_value(graph: Graph, node: Node, start: Tensor) -> Tensor:
    """Return the value of the last node of such a chain if `start` were its first tensor."""
    if node.op in _LEAVES:
        return start
    [(key, source)] = node.inputs.items()
    operand = _chain_value(graph, graph.by_name[source.name], start)
    result: Tensor = call(node.target, {**node.attrs, key: operand})
    return result


class _ObstacleError(Exception):
    """Ends a search at a node that no rotation passes, its only argument."""


class _Search:
    """Takes in values until all that reads or makes one is accounted for."""

    def __init__(self, graph: Graph, channels: int) -> None:
        self.graph = graph
        self.residual = Residual(channels)
        # By member: the node of the norm that has scaled its channels, if any
        self.norm_of: dict[str, str | None] = {}
        self.queue: deque[str] = deque()

    def run(self, name: str, axis: int) -> Residual:
        """Return what must be rotated together with this value."""
        node = self.graph.by_name[name]
        try:
            self.take(node, axis)
            while self.queue:
                member = self.graph.by_name[self.queue.popleft()]
                for reader in self.graph.consumers[member.name]:
                    # Without a name, the network returns the member
                    node = self.graph.by_name[reader] if reader else member
                    if not reader or not self.passes_reader(node, member):
                        raise _ObstacleError(node)
        except _ObstacleError as stop:
            [self.residual.obstacle] = stop.args
        return self.residual

    def take(self, node: Node, axis: int) -> None:
        """Take in a value whose channels are along `axis`, and first all that it is made of."""
        known_axis = self.residual.members.setdefault(node.name, axis)
        if known_axis != axis or (node.shape or ())[axis] != self.residual.channels:
            raise _ObstacleError(node)
        if node.name not in self.norm_of:
            self.norm_of[node.name] = None
            self.norm_of[node.name] = self.take_operands(node, axis)
            self.queue.append(node.name)

    def take_operands(self, node: Node, axis: int) -> str | None:
        """Account for how the value is made. Return the norm whose factors it has."""
        axes = node.row.axes
        rotates = Commutes.ROTATIONS in node.row.commutes
        if node.op in _LEAVES:
            self.residual.writers[node.name] = axis
        elif node.is_multiplying or node.row.looks_up:
            channels_axis = (node.row.channels or 0) % node.rank
            is_grouped = node.attrs.get("groups", 1) != 1
            if channels_axis != axis or is_grouped or "weight" not in node.params:
                raise _ObstacleError(node)
            self.residual.writers[node.name] = axis
        elif axes is ALIKE and rotates:
            return self.take_sum(node, axis)
        elif axes in (PRODUCT, QUOTIENT) and not node.attrs.get("rounding_mode"):
            return self.take_product(node, axis)
        elif axes is JOINED:
            self.take_joined(node, axis)
        elif rotates:
            return self.take_moved(node, axis)
        elif node.op in _NORMS and axis == node.rank - 1:
            return self.take_normalized(node, axis)
        elif node.op not in _ZEROS:
            raise _ObstacleError(node)
        return None

    def take_moved(self, node: Node, axis: int) -> str | None:
        """Take in one value that is moved, or averaged or summed over others of its axes."""
        source = self.graph.source(node)
        axis_before = moved_back(self.graph, node, axis)
        if source is None or axis_before is None:
            raise _ObstacleError(node)
        self.take(source, axis_before)
        if passes_shifts(node):
            return self.norm_of[source.name]
        return self.norm_without_shift(source)

    def take_joined(self, node: Node, axis: int) -> None:
        """Take in rotated values side by side, in another dimension."""
        dim = int(node.attrs.get("dim", 0)) % node.rank
        if dim == axis:
            raise _ObstacleError(node)
        for part in self.operands(node):
            axis_of_part = axis
            # Stacked parts lack the axis `dim`
            if part.rank < node.rank and dim < axis:
                axis_of_part -= 1
            self.take_without_norm(part, axis_of_part)

    def take_sum(self, node: Node, axis: int) -> str | None:
        """Take in two rotated values, or one and a number for each token. The sum with a
        parameter after a norm is the norm's bias.
        """
        parts = [part for part in self.operands(node) if self.has_channels(part, node, axis)]
        if not parts:
            raise _ObstacleError(node)
        is_plain = node.op == "add" and node.attrs.get("alpha", 1) == 1
        if len(parts) == 2 and is_plain and axis == node.rank - 1:
            for part, other in (parts, parts[::-1]):
                norm = self.norm_of.get(part.name)
                if norm:
                    return self.add_norm_shift(node, norm, other)
        for part in parts:
            self.take_without_norm(part, axis - node.rank + part.rank)
        # One number added to all channels is a multiple of the vector of ones
        self.residual.keeps_mean |= len(parts) == 1
        return None

    def take_product(self, node: Node, axis: int) -> str | None:
        """Take in a rotated value times a number for each token, or a normalized value times a
        parameter, whose values are the factors of the norm.
        """
        operands = self.operands(node)
        is_product = node.row.axes is PRODUCT
        parts = [part for part in operands if self.has_channels(part, node, axis)]
        if len(parts) == 1 and (is_product or parts[0] is operands[0]):
            self.take(parts[0], axis - node.rank + parts[0].rank)
            return self.norm_without_shift(parts[0])
        if len(parts) == 2 and is_product and axis == node.rank - 1:
            for factor, other in (parts, parts[::-1]):
                is_new = factor.name not in self.residual.members and factor is not other
                if is_new and _leaf(self.graph, factor):
                    self.take_without_norm(other, axis)
                    return self.add_norm_factor(node, factor)
        raise _ObstacleError(node)

    def take_normalized(self, node: Node, axis: int) -> str | None:
        """Take in what a norm that is one operator reads."""
        channels = self.residual.channels
        source = self.graph.source(node)
        if source is None or list(node.attrs["normalized_shape"]) != [channels]:
            raise _ObstacleError(node)
        self.take_without_norm(source, axis)
        self.residual.keeps_mean |= node.op == "layer_norm"
        values = {key: self.graph.tensors[path].double() for key, path in node.params.items()}
        factor = values.get("weight", torch.ones(channels, dtype=torch.float64))
        plain = {"weight": torch.ones_like(factor), "bias": torch.zeros_like(factor)}
        neutral = tuple((node.name, key, plain[key]) for key in values)
        shift = values.get("bias")
        norm = Norm(factor, shift, neutral)
        self.residual.norms[node.name] = norm
        return node.name

    def add_norm_factor(self, node: Node, factor: Node) -> str | None:
        """Note the product of a normalized value with a parameter, or with an expression of one
        (1 + weight).
        """
        start = _leaf(self.graph, factor)
        assert start is not None
        weight = self.graph.weight(start)
        # A factor `weight` is neutral at one, and a factor `1 + weight` at zero
        for number in (1.0, 0.0):
            neutral = torch.full_like(weight, number)
            if bool((_chain_value(self.graph, factor, neutral) == 1).all()):
                factors = _chain_value(self.graph, factor, weight).double().flatten()
                neutral_weight = (start.name, "weight", neutral)
                norm = Norm(factors, None, (neutral_weight,))
                self.residual.norms[node.name] = norm
                return node.name
        raise _ObstacleError(node)

    def add_norm_shift(self, node: Node, norm: str, bias: Node) -> str | None:
        """Note a norm's bias that is added by an operator of its own."""
        before = self.residual.norms[norm]
        if before.shift is not None or _leaf(self.graph, bias) is not bias:
            raise _ObstacleError(node)
        shift = self.graph.weight(bias)
        neutral = (*before.neutral, (bias.name, "weight", torch.zeros_like(shift)))
        shifted = Norm(before.factor, shift.double().flatten(), neutral)
        self.residual.norms[node.name] = shifted
        return node.name

    def passes_reader(self, node: Node, member: Node) -> bool:
        """Account for one reader of a member. Return False if no rotation passes it."""
        axis = self.residual.members[member.name]
        norm = self.norm_of[member.name]
        is_linear = node.is_multiplying and node.row.spatial == 0
        if is_linear and axis == member.rank - 1 and node.inputs["input"] == Ref(member.name):
            self.residual.readers[node.name] = norm
            return True
        if norm is None and _is_square(node):
            readers = [self.graph.by_name[name] for name in self.graph.consumers[node.name]]
            return all(_is_mean(reader, node, axis) for reader in readers)
        if norm is None and _is_mean(node, member, axis):
            self.residual.keeps_mean = True
            return True
        # `expand_as` and its like take only the shape of their second operand
        reads_shape = node.row.only_moves and member.name not in paths(node)
        if node.op in _ZEROS or reads_shape:
            return True
        axis_after = None
        if self.graph.source(node) is member:
            axis_after = moved(self.graph, node, axis)
        if axis_after is None:
            axis_after = _axis_of_combination(node, member, axis)
        if axis_after is None:
            return False
        self.take(node, axis_after)
        return True

    def norm_without_shift(self, node: Node) -> str | None:
        """Return the norm that scaled a member's channels, or None.

        A norm with a shift is an obstacle: a factor of each token would also scale the shift.
        """
        norm = self.norm_of[node.name]
        if norm is not None and self.residual.norms[norm].shift is not None:
            raise _ObstacleError(node)
        return norm

    def take_without_norm(self, node: Node, axis: int) -> None:
        """Take in a value whose channels have no factors of a norm."""
        self.take(node, axis)
        if self.norm_of[node.name] is not None:
            raise _ObstacleError(node)

    def operands(self, node: Node) -> list[Node]:
        """Return the nodes that a node reads."""
        return [self.graph.by_name[name] for name in node.refs()]

    def has_channels(self, part: Node, node: Node, axis: int) -> bool:
        """Check whether an operand has the channels, rather than one value for all of them."""
        shape = part.shape or ()
        axis_of_part = axis - node.rank + len(shape)
        return axis_of_part >= 0 and shape[axis_of_part] != 1


def _axis_of_combination(node: Node, member: Node, axis: int) -> int | None:
    """Return the member's axis in the output of an operator that joins or combines values;
    None for other operators.
    """
    new_axes = node.rank - member.rank
    if node.row.axes is JOINED:
        dim = int(node.attrs.get("dim", 0)) % node.rank
        return axis + new_axes if dim <= axis else axis
    combines = node.row.axes in (ALIKE, PRODUCT, QUOTIENT) or node.op in _NORMS
    return axis + new_axes if combines and node.shape else None


def _is_mean(node: Node, member: Node, axis: int) -> bool:
    """Check whether the node is the mean or the sum over the member's channels alone."""
    dims = node.attrs.get("dim")
    if node.row.axes is not REDUCED or not isinstance(dims, list):
        return False
    return [dim % member.rank for dim in dims] == [axis]
