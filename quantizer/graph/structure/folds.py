"""Find where the channels of a value are divided exactly: in parameters of the layers that they
come from. Channels are followed through the graph.
"""

import heapq
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import ALIKE, PRODUCT, SAME
from quantizer.graph.channels.labels import (
    NONE,
    carried,
    channels_along,
    compress_labels,
    distinct,
    meta_values,
    numbered_labels,
    paths,
)
from quantizer.graph.ir import Graph, Node, walk_back
from quantizer.graph.structure.definitions import Fold, InputGroup
from quantizer.graph.targets import call


@dataclass(frozen=True)
class Source:
    """A layer whose parameters have a factor for each channel.

    Args:
        kind: "norm" or "layer", as in `Fold`.
        node: the layer, or the tensor that a decomposed normalization multiplies with.
        offset: what the graph adds to that tensor.
        skipped: the node that adds it.
    """

    kind: Literal["norm", "layer"]
    node: Node
    offset: float = 0.0
    skipped: str = ""


@dataclass
class Flow:
    """Where the channels of a source go.

    Args:
        ends: by multiplying layer, for each channel of its input the source's channel.
        between: the nodes that they go through.
        mixed: by node that reads channels in any other way, those channels; "" is the network's
            output.
    """

    ends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    between: list[str] = field(default_factory=list)
    mixed: dict[str, frozenset[int]] = field(default_factory=dict)

    def mix(self, reader: str, labels: Any) -> None:
        """Record that `reader` uses these labels in a way that no factor passes."""
        before = self.mixed.get(reader, frozenset())
        self.mixed[reader] = before | distinct(labels)


class Folds:
    """Finds folds on one graph, and follows each source once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._flows: dict[str, Flow] = {}

    def folded(self, group: InputGroup) -> InputGroup:
        """Return the group with its fold, or with the reason why it has none."""
        if group.tied:
            others = ", ".join(group.tied)
            return replace(group, fold=None, why_not=f"its weight is also that of {others}")
        sources, why_not = self.sources(group.source)
        before = self.way_back(group.source)
        reasons: list[str] = []
        for source in sorted(sources, key=self._distance):
            fold = self._fold(source, group, before)
            if isinstance(fold, Fold):
                return replace(group, fold=fold, why_not="")
            reasons.append(fold)
        return replace(group, fold=None, why_not=[*reasons, why_not][0])

    def _distance(self, source: Source) -> int:
        """Return a number that is the smaller, the later a source runs."""
        return -self.graph.index[source.node.name]

    def sources(self, name: str) -> tuple[list[Source], str]:
        """Return the layers whose channels those of a value may be, nearest first, and why the
        first way back that reaches no layer ends.
        """
        sources: list[Source] = []
        ends: list[str] = []
        visited = {name}
        pending = [name]
        while pending:
            node = self.graph.by_name[pending.pop(0)]
            source = self._source(node)
            if source is not None:
                sources.append(source)
                continue
            operands = paths(node)
            if not operands:
                ends.append(_why_it_ends(node))
            for operand in operands:
                factor = self._factor(node, operand)
                if factor is not None:
                    sources.append(factor)
                elif operand not in visited:
                    visited.add(operand)
                    pending.append(operand)
        return sources, ends[0] if ends else ""

    def way_back(self, name: str) -> frozenset[str]:
        """Return the nodes between a value and the layers whose channels it may have, with both
        ends.
        """

        def operands(node: Node) -> tuple[str, ...]:
            return paths(node) if self._source(node) is None else ()

        return frozenset(node.name for node in walk_back(self.graph, [name], operands))

    def _source(self, node: Node) -> Source | None:
        """Return the node if the rows of its own weight are the channels of its output."""
        if not node.is_float or "weight" not in node.params or "bias" in node.inputs:
            return None
        if node.is_multiplying:
            return Source("layer", node)
        if node.row.channels is None or self.graph.weight(node).dim() != 1:
            return None
        return Source("norm", node)

    def _factor(self, node: Node, name: str) -> Source | None:
        """Return what a decomposed normalization multiplies with: a tensor of the model, or
        the sum of one and a number.
        """
        if node.row.axes is not PRODUCT:
            return None
        offset = 0.0
        skipped = ""
        factor = self.graph.by_name[name]
        while not factor.is_tensor:
            before = self.graph.source(factor)
            if before is None or len(list(factor.refs())) != 1:
                return None
            if factor.row.axes is ALIKE and not skipped:
                zero = torch.zeros(())
                offset = float(call(factor.target, {**factor.attrs, "input": zero}))
                skipped = factor.name
            elif not factor.row.only_moves or factor.row.axes is not SAME:
                return None
            factor = before
        weight = self.graph.weight(factor)
        count = weight.numel()
        if not weight.is_floating_point() or count < 2 or max(weight.shape) != count:
            return None
        return Source("norm", factor, offset, skipped)

    def _fold(self, source: Source, group: InputGroup, before: Container[str]) -> Fold | str:
        """Return the fold of a group in a source, or why its channels cannot be divided there.

        Args:
            source: where the channels may come from.
            group: the layers that read them.
            before: the nodes on the way back from the group's value.
        """
        name = source.node.name
        for path in source.node.params.values():
            if self.graph.uses[path] > 1:
                other = self._other_user(path, name)
                return f"{name} shares its parameters with {other}"
        flow = self.flow(source)
        channels = flow.ends.get(group.layers[0])
        if channels is None:
            for reader in flow.mixed:
                if reader in before:
                    return _why_it_ends(self.graph.by_name[reader])
        is_common = all(flow.ends.get(layer) == channels for layer in group.layers)
        if channels is None or NONE in channels or not is_common:
            return f"not each of its channels is one of {name}"
        needed = frozenset(channels)
        for reader, mixed in flow.mixed.items():
            if mixed & needed:
                return f"{name} is also read by {reader or 'the output of the network'}"
        extra: list[str] = []
        for end, end_channels in flow.ends.items():
            if end in group.layers or needed.isdisjoint(end_channels):
                continue
            if end_channels != channels:
                return f"{name} is also read by {end}, with its channels in another order"
            if self.graph.uses[self.graph.by_name[end].params["weight"]] > 1:
                return f"{name} is also read by {end}, whose weight others use"
            extra.append(end)
        count = len(distinct(self._start(source)))
        if channels == tuple(range(count)):
            channels = None
        return Fold(source.kind, name, channels, source.offset, tuple(extra))

    def _other_user(self, path: str, name: str) -> str:
        """Return the first node except `name` that uses a tensor."""
        users = (node for node in self.graph.nodes if path in node.params.values())
        return next(user.name for user in users if user.name != name)

    def _start(self, source: Source) -> Tensor | None:
        """Return the labels of a source's own channels in what it makes."""
        node = source.node
        if node.is_tensor:
            shape = self.graph.weight(node).shape
            return torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        value = meta_values(self.graph).get(node.name)
        axis = node.row.channels
        return None if value is None or axis is None else numbered_labels(value.shape, axis)

    def flow(self, source: Source) -> Flow:
        """Return where a source's channels go."""
        name = source.node.name
        if name not in self._flows:
            self._flows[name] = self._followed(source)
        return self._flows[name]

    def _followed(self, source: Source) -> Flow:
        """Follow a source's channels in execution order."""
        flow = Flow()
        start = self._start(source)
        if start is None:
            return flow
        labels = {source.node.name: compress_labels(start)}
        queue: list[int] = []
        queued: set[int] = set()
        name = source.node.name
        while True:
            if name in labels:
                for reader in self.graph.consumers[name]:
                    if not reader:
                        flow.mix("", labels[name])
                    elif self.graph.index[reader] not in queued:
                        queued.add(self.graph.index[reader])
                        heapq.heappush(queue, self.graph.index[reader])
            if not queue:
                return flow
            node = self.graph.nodes[heapq.heappop(queue)]
            name = node.name
            moved = self._step(node, source, labels, flow)
            if moved is not None:
                labels[name] = moved
                flow.between.append(name)

    def _step(self, node: Node, source: Source, labels: Mapping[str, Any], flow: Flow) -> Any:
        """Return the labels of what a node makes.

        Where the way ends, return None and record the end in `flow`.
        """
        read = {name: labels[name] for name in node.refs() if name in labels}
        if node.name == source.skipped:
            return next(iter(read.values()))
        axis = node.row.channels
        if node.is_multiplying and axis is not None:
            value = read.get(node.inputs["input"].name)
            channels = channels_along(value, axis) if isinstance(value, Tensor) else None
            if channels is not None and len(read) == 1:
                flow.ends[node.name] = channels
                return None
        operands = paths(node)
        carriers = {name: value for name, value in read.items() if name in operands}
        moved = carried(self.graph, node, carriers) if carriers else None
        for name, value in read.items():
            if moved is None or name not in operands:
                flow.mix(node.name, value)
        return moved


def _why_it_ends(node: Node) -> str:
    """Return why a way back ends at a node that no factor passes."""
    if node.op == "input":
        return "it is an input of the network"
    return f"no factor passes through {node.name}"
