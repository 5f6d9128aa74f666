"""Finds what a rotation passes through: the values between linear layers, embeddings, additions
and norms.

Starts at what a norm reads and takes in whatever must turn with it; no names, no table of
architectures.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantizer.graph.axis_rules import ALIKE, JOINED, PRODUCT, QUOTIENT, REDUCED, Commutes
from quantizer.graph.channel_labels import ChannelLabels, passes_shifts, paths
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.targets import call

_NORMS = ("layer_norm", "rms_norm")
_SQUARES = ("pow", "square")
_LEAVES = ("parameter", "constant")
_ZEROS = ("zeros", "zeros_like", "new_zeros")


@dataclass(frozen=True)
class Norm:
    """What multiplies the channels after a normalization, and is added to them, float64
    [channels] each.

    `neutral` are the parameters, as layer, key and value, with which it multiplies by one and
    adds zero.
    """

    factor: Tensor
    shift: Tensor | None
    neutral: tuple[tuple[str, str, Tensor], ...]


@dataclass
class Residual:
    """Values that one rotation turns.

    `members` has the axis of the channels by node; `readers` the linear layers and the norm
    before each; `writers` the layers, parameters and constants that make them; `norms` by the
    node that ends them. `keeps_mean` says that something takes the mean over channels, so that
    the rotation must keep the vector of ones. `obstacle` is the first node that no rotation
    passes, None where all is well.
    """

    channels: int
    keeps_mean: bool = False
    members: dict[str, int] = field(default_factory=dict)
    readers: dict[str, str | None] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    obstacle: Node | None = None


def residuals(graph: Graph) -> Iterator[Residual]:
    """Each set of values that turn together, in the order of the graph; also those with an
    obstacle.
    """
    seen: set[str] = set()
    labels = ChannelLabels(graph)
    for node in graph.nodes:
        source = graph.source(node) if node.op in _NORMS or _squares(node) else None
        if (
            source is None
            or source.name in seen
            or not source.shape
            or source.shape[-1] is None
        ):
            continue
        found = _Search(labels, source.shape[-1]).run(source.name, len(source.shape) - 1)
        seen |= found.members.keys()
        yield found


def _squares(node: Node) -> bool:
    return node.op in _SQUARES and node.attrs.get("exponent", 2) == 2


def _leaf(graph: Graph, node: Node) -> Node | None:
    """The tensor of one axis that a chain of operators with one input begins with, if nobody
    else reads any of it.
    """
    while len(graph.consumers[node.name]) == 1 and node.op not in _LEAVES:
        sources = list(node.refs())
        if len(sources) != 1 or not node.target.startswith("aten."):
            return None
        node = graph.by_name[sources[0]]
    if node.op not in _LEAVES or len(graph.consumers[node.name]) != 1:
        return None
    return node if (node.shape or ())[-1:] == (graph.weight(node).numel(),) else None


def _value(graph: Graph, node: Node, start: Tensor) -> Tensor:
    """What such a chain gives when its tensor is `start`."""
    if node.op in _LEAVES:
        return start
    ((key, source),) = node.inputs.items()
    result: Tensor = call(
        node.target, {**node.attrs, key: _value(graph, graph.by_name[source.name], start)}
    )
    return result


class _ObstacleError(Exception):
    """Ends a search."""


class _Search:
    """Takes in values until all that reads or makes one is accounted for."""

    def __init__(self, labels: ChannelLabels, channels: int) -> None:
        self.labels, self.graph, self.found = labels, labels.graph, Residual(channels)
        # By member: the norm whose factors its channels still have
        self.norm: dict[str, str | None] = {}
        self.queue: deque[str] = deque()

    def run(self, name: str, axis: int) -> Residual:
        """What turns together with this value."""
        node = self.graph.by_name[name]
        try:
            self.take(node, axis)
            while self.queue:
                member = self.queue.popleft()
                for reader in self.graph.consumers[member]:
                    node = self.graph.by_name[reader or member]
                    if not reader or not self.reads(node, self.graph.by_name[member]):
                        raise _ObstacleError
        except _ObstacleError as stop:
            self.found.obstacle = stop.args[0] if stop.args else node
        return self.found

    def take(self, node: Node, axis: int) -> None:
        """Take in a value whose channels lie along `axis`, and first all that it is made of."""
        known = self.found.members.setdefault(node.name, axis)
        if known != axis or (node.shape or ())[axis] != self.found.channels:
            raise _ObstacleError(node)
        if node.name not in self.norm:
            self.norm[node.name] = None
            self.norm[node.name] = self.made(node, axis)
            self.queue.append(node.name)

    def made(self, node: Node, axis: int) -> str | None:
        """Account for how the value is made; returns the norm whose factors it has."""
        last, axes, rotates = (
            axis == node.rank - 1,
            node.row.axes,
            Commutes.ROTATIONS in node.row.commutes,
        )
        if node.op in _LEAVES:
            self.found.writers[node.name] = axis
        elif node.is_multiplying or node.row.looks_up:
            channels = (node.row.channels or 0) % node.rank
            if (
                channels != axis
                or node.attrs.get("groups", 1) != 1
                or "weight" not in node.params
            ):
                raise _ObstacleError(node)
            self.found.writers[node.name] = axis
        elif axes is ALIKE and rotates:
            return self.sum(node, axis)
        elif axes in (PRODUCT, QUOTIENT) and not node.attrs.get("rounding_mode"):
            return self.product(node, axis)
        elif axes is JOINED:
            self.joined(node, axis)
        elif rotates:
            return self.moved(node, axis)
        elif node.op in _NORMS and last:
            return self.normalized(node, axis)
        elif node.op not in _ZEROS:
            raise _ObstacleError(node)
        return None

    def moved(self, node: Node, axis: int) -> str | None:
        """One value, moved, or averaged or summed over others of its axes."""
        source, before = self.graph.source(node), self.labels.moved_back(node, axis)
        if source is None or before is None:
            raise _ObstacleError(node)
        self.take(source, before)
        return self.norm[source.name] if passes_shifts(node) else self.without_shift(source)

    def joined(self, node: Node, axis: int) -> None:
        """Rotated values side by side, in another dimension."""
        dim = int(node.attrs.get("dim", 0)) % node.rank
        if dim == axis:
            raise _ObstacleError(node)
        for part in self.operands(node):
            self.plain(part, axis - (dim < axis and part.rank < node.rank))

    def sum(self, node: Node, axis: int) -> str | None:
        """Two rotated values, or one and a number for each token; after a norm, its bias."""
        parts = [part for part in self.operands(node) if self.spans(part, node, axis)]
        if len(parts) == 2:
            for part, other in (parts, parts[::-1]):
                norm = self.norm.get(part.name)
                if (
                    norm
                    and node.op == "add"
                    and node.attrs.get("alpha", 1) == 1
                    and axis == node.rank - 1
                ):
                    return self.shifted(node, norm, other)
        for part in parts:
            self.plain(part, axis - node.rank + part.rank)
        self.found.keeps_mean |= len(parts) == 1
        if not parts:
            raise _ObstacleError(node)
        return None

    def product(self, node: Node, axis: int) -> str | None:
        """A rotated value times a number for each token, or times a parameter: the factors of a
        norm.
        """
        operands = self.operands(node)
        parts = [part for part in operands if self.spans(part, node, axis)]
        if len(parts) == 1 and (node.row.axes is PRODUCT or parts[0] is operands[0]):
            self.take(parts[0], axis - node.rank + parts[0].rank)
            return self.without_shift(parts[0])
        factor = next(
            (
                part
                for part in parts
                if part.name not in self.found.members and _leaf(self.graph, part)
            ),
            None,
        )
        if (
            node.row.axes is not PRODUCT
            or factor is None
            or len(parts) != 2
            or axis != node.rank - 1
        ):
            raise _ObstacleError(node)
        self.plain(next(part for part in parts if part is not factor), axis)
        return self.scaled(node, factor)

    def normalized(self, node: Node, axis: int) -> str | None:
        """A norm that is one operator."""
        source = self.graph.source(node)
        sizes = list(node.attrs["normalized_shape"])
        if source is None or sizes != [self.found.channels]:
            raise _ObstacleError(node)
        self.plain(source, axis)
        self.found.keeps_mean |= node.op == "layer_norm"
        own = {key: self.graph.tensors[path].double() for key, path in node.params.items()}
        factor = own.get("weight", torch.ones(self.found.channels, dtype=torch.float64))
        neutral = {"weight": torch.ones_like(factor), "bias": torch.zeros_like(factor)}
        plain = tuple((node.name, key, neutral[key]) for key in own)
        self.found.norms[node.name] = Norm(factor, own.get("bias"), plain)
        return node.name

    def scaled(self, node: Node, factor: Node) -> str | None:
        """The product of a normalized value with a parameter, or with an expression of one (1 +
        weight).
        """
        start = _leaf(self.graph, factor)
        assert start is not None
        own = self.graph.weight(start)
        for number in (1.0, 0.0):
            neutral = torch.full_like(own, number)
            if bool((_value(self.graph, factor, neutral) == 1).all()):
                factors = _value(self.graph, factor, own).double().flatten()
                self.found.norms[node.name] = Norm(
                    factors, None, ((start.name, "weight", neutral),)
                )
                return node.name
        raise _ObstacleError(node)

    def shifted(self, node: Node, norm: str, bias: Node) -> str | None:
        """A norm's bias that is added by an operator of its own."""
        before = self.found.norms[norm]
        if before.shift is not None or _leaf(self.graph, bias) is not bias:
            raise _ObstacleError(node)
        own = self.graph.weight(bias)
        neutral = (*before.neutral, (bias.name, "weight", torch.zeros_like(own)))
        self.found.norms[node.name] = Norm(before.factor, own.double().flatten(), neutral)
        return node.name

    def reads(self, node: Node, member: Node) -> bool:
        """Account for one reader of a member; False where no rotation passes."""
        axis, norm = self.found.members[member.name], self.norm[member.name]
        last = axis == member.rank - 1
        if (
            node.is_multiplying
            and node.row.spatial == 0
            and node.inputs["input"] == Ref(member.name)
            and last
        ):
            self.found.readers[node.name] = norm
            return True
        if norm is None and _squares(node):
            return all(
                self.is_mean(self.graph.by_name[name], node, axis)
                for name in self.graph.consumers[node.name]
            )
        if norm is None and self.is_mean(node, member, axis):
            self.found.keeps_mean = True
            return True
        if node.op in _ZEROS or (node.row.only_moves and member.name not in paths(node)):
            return True  # reads its type or shape
        after = self.labels.moved(node, axis) if self.graph.source(node) is member else None
        after = self.aligned(node, member, axis) if after is None else after
        if after is None:
            return False
        self.take(node, after)
        return True

    def aligned(self, node: Node, member: Node, axis: int) -> int | None:
        """Where an operator that joins or combines values has the axis in its output."""
        more = node.rank - member.rank
        if node.row.axes is JOINED:
            return axis + (more and int(node.attrs.get("dim", 0)) % node.rank <= axis)
        combines = node.row.axes in (ALIKE, PRODUCT, QUOTIENT) or node.op in _NORMS
        return axis + more if combines and node.shape else None

    def without_shift(self, node: Node) -> str | None:
        """The norm whose factors a member still has; what is added after a norm would not pass
        a factor of tokens.
        """
        norm = self.norm[node.name]
        if norm is not None and self.found.norms[norm].shift is not None:
            raise _ObstacleError(node)
        return norm

    def is_mean(self, node: Node, member: Node, axis: int) -> bool:
        """Whether it is the mean or the sum over the channels alone."""
        dims = node.attrs.get("dim")
        size = member.rank
        return (
            node.row.axes is REDUCED
            and isinstance(dims, list)
            and [dim % size for dim in dims] == [axis]
        )

    def plain(self, node: Node, axis: int) -> None:
        """Take in a value whose channels have no factors."""
        self.take(node, axis)
        if self.norm[node.name] is not None:
            raise _ObstacleError(node)

    def operands(self, node: Node) -> list[Node]:
        return [self.graph.by_name[name] for name in node.refs()]

    def spans(self, part: Node, node: Node, axis: int) -> bool:
        """Whether an operand has the channels, rather than one value for all of them."""
        shape = part.shape or ()
        at = axis - node.rank + len(shape)
        return at >= 0 and shape[at] != 1
