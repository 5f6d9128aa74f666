"""Finds what a rotation passes through: the values between linear layers, embeddings, additions and norms.

Starts at what a norm reads and takes in whatever must turn with it; no names, no table of architectures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantizer.algorithms.axis_rules import input_of, is_move, moved, moved_back
from quantizer.algorithms.parameter_chain import leaf, value
from quantizer.graph.ir import Graph, Node, Ref

_NORMS = ("layer_norm", "rms_norm")
_SQUARES = ("pow", "square")
_SUMS = ("mean", "sum")
_JOINS = ("cat", "stack")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_WRITERS = {"linear": -1, "embedding": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}  # and the axis of what they write


@dataclass(frozen=True)
class Norm:
    """What multiplies the channels after a normalization, and is added to them, float64 [channels] each.

    `neutral` are the parameters, as layer, key and value, with which it multiplies by one and adds zero.
    """

    factor: Tensor
    shift: Tensor | None
    neutral: tuple[tuple[str, str, Tensor], ...]


@dataclass
class Residual:
    """Values that one rotation turns.

    `members` has the axis of the channels by node; `readers` the linear layers and the norm before each; `writers` the
    layers, parameters and constants that make them; `norms` by the node that ends them. `keeps_mean` says that
    something takes the mean over channels, so that the rotation must keep the vector of ones. `obstacle` is the first
    node that no rotation passes, None where all is well.
    """

    channels: int
    keeps_mean: bool = False
    members: dict[str, int] = field(default_factory=dict)
    readers: dict[str, str | None] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    obstacle: Node | None = None


def residuals(graph: Graph) -> Iterator[Residual]:
    """Each set of values that turn together, in the order of the graph; also those with an obstacle."""
    seen: set[str] = set()
    for node in graph.nodes:
        source = input_of(graph, node) if _normalizes(node) else None
        if source is None or source.name in seen or not source.shape or source.shape[-1] is None:
            continue
        found = _Search(graph, source.shape[-1]).run(source.name, len(source.shape) - 1)
        seen |= found.members.keys()
        yield found


def _normalizes(node: Node) -> bool:
    return node.op in _NORMS or _squares(node)


def _squares(node: Node) -> bool:
    return node.op in _SQUARES and node.attrs.get("exponent", 2) == 2


class _ObstacleError(Exception):
    """Ends a search."""


class _Search:
    """Takes in values until all that reads or makes one is accounted for."""

    def __init__(self, graph: Graph, channels: int) -> None:
        self.graph, self.found = graph, Residual(channels)
        self.norm: dict[str, str | None] = {}  # by member: the norm whose factors its channels still have
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
        last = axis == len(node.shape or ()) - 1
        if node.op in ("parameter", "constant"):
            self.found.writers[node.name] = axis
        elif node.op in _WRITERS:
            channels = _WRITERS[node.op] % len(node.shape or ())
            if channels != axis or node.attrs.get("groups", 1) != 1 or "weight" not in node.params:
                raise _ObstacleError(node)
            self.found.writers[node.name] = axis
        elif is_move(node):
            return self.moved(node, axis)
        elif node.op in ("add", "sub"):
            return self.sum(node, axis)
        elif node.op in ("mul", "div", "neg"):
            return self.product(node, axis)
        elif node.op in _NORMS and last:
            return self.normalized(node, axis)
        elif node.op in _JOINS:
            self.joined(node, axis)
        elif node.op in _SUMS:
            return self.reduced(node, axis)
        elif node.op not in _ZEROS:
            raise _ObstacleError(node)
        return None

    def moved(self, node: Node, axis: int) -> str | None:
        source, before = input_of(self.graph, node), moved_back(self.graph, node, axis)
        if source is None or before is None:
            raise _ObstacleError(node)
        self.take(source, before)
        return self.norm[source.name]

    def joined(self, node: Node, axis: int) -> None:
        """Rotated values side by side, in another dimension."""
        dim = int(node.attrs.get("dim", 0)) % len(node.shape or ())
        if dim == axis:
            raise _ObstacleError(node)
        for part in self.operands(node):
            self.plain(part, axis - (node.op == "stack" and dim < axis))

    def reduced(self, node: Node, axis: int) -> str | None:
        """A mean or a sum over tokens or experts."""
        source = input_of(self.graph, node)
        axes = range(len(source.shape or ())) if source is not None else ()
        before = next((at for at in axes if source is not None and self.kept(node, source, at) == axis), None)
        if source is None or before is None:
            raise _ObstacleError(node)
        self.take(source, before)
        return self.norm[source.name] if node.op == "mean" else self.without_shift(source)

    def sum(self, node: Node, axis: int) -> str | None:
        """Two rotated values, or one and a number for each token; after a norm, its bias."""
        parts = [part for part in self.operands(node) if self.spans(part, node, axis)]
        if len(parts) == 2:
            for part, other in (parts, parts[::-1]):
                norm = self.norm.get(part.name)
                if norm and node.op == "add" and axis == len(node.shape or ()) - 1:
                    return self.shifted(node, norm, other)
        for part in parts:
            self.plain(part, axis - len(node.shape or ()) + len(part.shape or ()))
        self.found.keeps_mean |= len(parts) == 1
        if not parts:
            raise _ObstacleError(node)
        return None

    def product(self, node: Node, axis: int) -> str | None:
        """A rotated value times a number for each token, or times a parameter: the factors of a norm."""
        operands = self.operands(node)
        parts = [part for part in operands if self.spans(part, node, axis)]
        if len(parts) == 1 and (node.op != "div" or parts[0] is operands[0]):
            self.take(parts[0], axis - len(node.shape or ()) + len(parts[0].shape or ()))
            return self.without_shift(parts[0])
        factor = next((part for part in parts if part.name not in self.found.members and leaf(self.graph, part)), None)
        if node.op != "mul" or factor is None or len(parts) != 2 or axis != len(node.shape or ()) - 1:
            raise _ObstacleError(node)
        self.plain(next(part for part in parts if part is not factor), axis)
        return self.scaled(node, factor)

    def normalized(self, node: Node, axis: int) -> str | None:
        """A norm that is one operator."""
        source = input_of(self.graph, node)
        sizes = list(node.attrs["normalized_shape"])
        if source is None or sizes != [self.found.channels]:
            raise _ObstacleError(node)
        self.plain(source, axis)
        self.found.keeps_mean |= node.op == "layer_norm"
        own = {key: self.graph.tensors[path].double() for key, path in node.params.items()}
        factor = own.get("weight", torch.ones(self.found.channels, dtype=torch.float64))
        neutral = {"weight": torch.ones_like(factor), "bias": torch.zeros_like(factor)}
        self.found.norms[node.name] = Norm(
            factor, own.get("bias"), tuple((node.name, key, neutral[key]) for key in own)
        )
        return node.name

    def scaled(self, node: Node, factor: Node) -> str | None:
        """The product of a normalized value with a parameter, or with an expression of one (1 + weight)."""
        start = leaf(self.graph, factor)
        assert start is not None
        own = self.graph.tensors[start.params["weight"]]
        for number in (1.0, 0.0):
            neutral = torch.full_like(own, number)
            if bool((value(self.graph, factor, neutral) == 1).all()):
                factors = value(self.graph, factor, own).double().flatten()
                self.found.norms[node.name] = Norm(factors, None, ((start.name, "weight", neutral),))
                return node.name
        raise _ObstacleError(node)

    def shifted(self, node: Node, norm: str, bias: Node) -> str | None:
        """A norm's bias that is added by an operator of its own."""
        before = self.found.norms[norm]
        if before.shift is not None or leaf(self.graph, bias) is not bias:
            raise _ObstacleError(node)
        own = self.graph.tensors[bias.params["weight"]]
        neutral = (*before.neutral, (bias.name, "weight", torch.zeros_like(own)))
        self.found.norms[node.name] = Norm(before.factor, own.double().flatten(), neutral)
        return node.name

    def reads(self, node: Node, member: Node) -> bool:
        """Account for one reader of a member; False where no rotation passes."""
        axis, norm = self.found.members[member.name], self.norm[member.name]
        last = axis == len(member.shape or ()) - 1
        if node.op == "linear" and node.inputs.get("input") == Ref(member.name) and "weight" in node.params and last:
            self.found.readers[node.name] = norm
            return True
        if norm is None and _squares(node):
            return all(self.is_mean(self.graph.by_name[name], node, axis) for name in self.graph.consumers[node.name])
        if norm is None and self.is_mean(node, member, axis):
            self.found.keeps_mean = True
            return True
        if node.op in _ZEROS or (node.op in ("type_as", "expand") and input_of(self.graph, node) is not member):
            return True  # reads its type or shape
        after = moved(self.graph, node, axis) if is_move(node) else self.aligned(node, member, axis)
        if after is None:
            return False
        self.take(node, after)
        return True

    def aligned(self, node: Node, member: Node, axis: int) -> int | None:
        """Where an operator that computes has the axis in its output."""
        if node.op in _SUMS:
            return self.kept(node, member, axis)
        if node.op == "stack":
            return axis + (int(node.attrs.get("dim", 0)) % len(node.shape or ()) <= axis)
        computes = node.op in ("add", "sub", "mul", "div", "neg", "cat", *_NORMS)
        return axis + len(node.shape or ()) - len(member.shape or ()) if computes and node.shape else None

    def kept(self, node: Node, source: Node, axis: int) -> int | None:
        """Where a mean or a sum over other dimensions leaves an axis."""
        size, dims = len(source.shape or ()), node.attrs.get("dim")
        if not isinstance(dims, list) or axis in (gone := [dim % size for dim in dims]):
            return None
        return axis if node.attrs.get("keepdim") else axis - sum(dim < axis for dim in gone)

    def without_shift(self, node: Node) -> str | None:
        """The norm whose factors a member still has; what is added after a norm would not pass a factor of tokens."""
        norm = self.norm[node.name]
        if norm is not None and self.found.norms[norm].shift is not None:
            raise _ObstacleError(node)
        return norm

    def is_mean(self, node: Node, member: Node, axis: int) -> bool:
        """Whether it is the mean or the sum over the channels alone."""
        dims = node.attrs.get("dim")
        size = len(member.shape or ())
        return node.op in _SUMS and isinstance(dims, list) and [dim % size for dim in dims] == [axis]

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
        at = axis - len(node.shape or ()) + len(shape)
        return at >= 0 and shape[at] != 1
