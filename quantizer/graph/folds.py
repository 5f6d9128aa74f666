"""Where the channels of a value can be divided by factors, exactly: found by following channels
through the graph.
"""

import heapq
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantizer.graph.axis_rules import ALIKE, PRODUCT, SAME
from quantizer.graph.channel_labels import (
    NONE,
    ChannelLabels,
    channels_along,
    compressed,
    distinct,
    numbered,
    paths,
)
from quantizer.graph.ir import Graph, Node
from quantizer.graph.structure import Fold, InputGroup
from quantizer.graph.targets import call


@dataclass(frozen=True)
class Source:
    """A layer whose parameters have a factor for each channel; `skipped` is the sum that adds
    `offset` to them.
    """

    kind: Literal["norm", "layer"]
    node: Node
    offset: float = 0.0
    skipped: str = ""


@dataclass
class Flow:
    """Where the channels of a source go.

    Args:
        ends: multiplying layer -> for each channel of its input the source's channel.
        between: the nodes that they go through.
        mixed: who reads channels in any other way -> those channels; "" is the network's
            output.
    """

    ends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    between: list[str] = field(default_factory=list)
    mixed: dict[str, frozenset[int]] = field(default_factory=dict)

    def mix(self, reader: str, labels: Any) -> None:
        """Note that `reader` does with these labels what no factor passes."""
        self.mixed[reader] = self.mixed.get(reader, frozenset()) | distinct(labels)


class Folds:
    """Finds folds on one graph; flows are found once for each source."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.channels = ChannelLabels(graph)
        self._flows: dict[str, Flow] = {}

    def folded(self, group: InputGroup) -> InputGroup:
        """The group with its fold, or with the reason why it has none."""
        if group.tied:
            return replace(
                group, fold=None, why_not=f"its weight is also that of {', '.join(group.tied)}"
            )
        (sources, end), way = self.sources(group.source), self.way_back(group.source)
        reasons = list[str]()
        for source in sorted(sources, key=lambda each: -self.graph.index[each.node.name]):
            found = self._fold(source, group, way)
            if isinstance(found, Fold):
                return replace(group, fold=found, why_not="")
            reasons.append(found)
        return replace(group, fold=None, why_not=next(iter(reasons), end))

    def sources(self, name: str) -> tuple[list[Source], str]:
        """Layers whose channels a value's may be, nearest first, and what ends the first way
        back otherwise.
        """
        found: list[Source] = []
        ends: list[str] = []
        waiting, seen = [name], {name}
        while waiting:
            node = self.graph.by_name[waiting.pop(0)]
            source = self._source(node)
            ways = paths(node) if source is None else ()
            if source is not None:
                found.append(source)
            elif not ways:
                ends.append(_end(node))
            for path in ways:
                if (factor := self._factor(node, path)) is not None:
                    found.append(factor)
                elif path not in seen:
                    seen.add(path)
                    waiting.append(path)
        return found, next(iter(ends), "")

    def way_back(self, name: str) -> frozenset[str]:
        """The nodes between a value and the layers whose channels it may have, with both
        ends.
        """
        seen, waiting = {name}, [name]
        while waiting:
            node = self.graph.by_name[waiting.pop()]
            if self._source(node) is None:
                new = set(paths(node)) - seen
                seen |= new
                waiting += new
        return frozenset(seen)

    def _source(self, node: Node) -> Source | None:
        """The node, where the rows of its own weight are the channels of what it makes."""
        if not node.is_float or "weight" not in node.params or "bias" in node.inputs:
            return None
        if node.is_multiplying:
            return Source("layer", node)
        one_axis = self.graph.weight(node).dim() == 1
        return Source("norm", node) if node.row.channels is not None and one_axis else None

    def _factor(self, node: Node, name: str) -> Source | None:
        """What a decomposed normalization multiplies with: a tensor of the model, or one and a
        number.
        """
        if node.row.axes is not PRODUCT:
            return None
        offset, skipped = 0.0, ""
        factor = self.graph.by_name[name]
        while factor.op not in ("parameter", "constant"):
            before = self.graph.source(factor)
            if before is None or len(list(factor.refs())) != 1:
                return None
            if factor.row.axes is ALIKE and not skipped:
                offset, skipped = (
                    float(call(factor.target, {**factor.attrs, "input": torch.zeros(())})),
                    factor.name,
                )
            elif not (factor.row.only_moves and factor.row.axes is SAME):
                return None
            factor = before
        weight = self.graph.weight(factor)
        is_vector = (
            weight.is_floating_point()
            and weight.numel() > 1
            and max(weight.shape) == weight.numel()
        )
        return Source("norm", factor, offset, skipped) if is_vector else None

    def _fold(self, source: Source, group: InputGroup, way: Container[str]) -> Fold | str:
        """The fold of a group whose value may be the source's, or why its channels cannot be
        divided there.
        """
        name = source.node.name
        if shared := [
            path for path in source.node.params.values() if self.graph.uses[path] > 1
        ]:
            users = (
                n.name
                for n in self.graph.nodes
                if shared[0] in n.params.values() and n.name != name
            )
            return f"{name} shares its parameters with {next(users)}"
        flow = self.flow(source)
        channels = flow.ends.get(group.layers[0])
        if stopped := [reader for reader in flow.mixed if channels is None and reader in way]:
            return _end(self.graph.by_name[stopped[0]])
        if (
            channels is None
            or NONE in channels
            or any(flow.ends.get(layer) != channels for layer in group.layers)
        ):
            return f"not each of its channels is one of {name}"
        needed = frozenset(channels)
        for reader, read in flow.mixed.items():
            if read & needed:
                return f"{name} is also read by {reader or 'the output of the network'}"
        extra = [
            end
            for end, read in flow.ends.items()
            if end not in group.layers and needed & set(read)
        ]
        for end in extra:
            if flow.ends[end] != channels:
                return f"{name} is also read by {end}, with its channels in another order"
            if self.graph.uses[self.graph.by_name[end].params["weight"]] > 1:
                return f"{name} is also read by {end}, whose weight others use"
        same = channels == tuple(range(len(distinct(self._start(source)))))
        return Fold(source.kind, name, None if same else channels, source.offset, tuple(extra))

    def _start(self, source: Source) -> Tensor | None:
        """A source's own channels in what it makes."""
        node = source.node
        if node.op in ("parameter", "constant"):
            shape = self.graph.weight(node).shape
            return torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        made, axis = self.channels.values.get(node.name), node.row.channels
        return None if made is None or axis is None else numbered(made.shape, axis)

    def flow(self, source: Source) -> Flow:
        """Follow a source's channels in execution order."""
        name = source.node.name
        if name not in self._flows:
            self._flows[name] = self._followed(source)
        return self._flows[name]

    def _followed(self, source: Source) -> Flow:
        flow, start = Flow(), self._start(source)
        if start is None:
            return flow
        labels, queue, queued = dict[str, Any](), list[int](), set[int]()
        name, made = source.node.name, compressed(start)
        while True:
            if made is not None:
                labels[name] = made
                new = {
                    self.graph.index[reader] for reader in self.graph.consumers[name] if reader
                } - queued
                queued |= new
                for at in new:
                    heapq.heappush(queue, at)
                if "" in self.graph.consumers[name]:
                    flow.mix("", made)
            if not queue:
                return flow
            node = self.graph.nodes[heapq.heappop(queue)]
            name, made = node.name, self._step(node, source, labels, flow)
            flow.between += [name] if made is not None else []

    def _step(self, node: Node, source: Source, labels: Mapping[str, Any], flow: Flow) -> Any:
        """Labels of what a node makes; None where it ends the way, which is noted."""
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
        ways = paths(node)
        carriers = {name: found for name, found in read.items() if name in ways}
        made = self.channels.carried(node, carriers) if carriers else None
        for name, found in read.items():
            if made is None or name not in ways:
                flow.mix(node.name, found)
        return made


def _end(node: Node) -> str:
    """Why a way back ends at a node that no factor passes."""
    if node.op == "input":
        return "it is an input of the network"
    return f"no factor passes through {node.name}"
