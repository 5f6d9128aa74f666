"""What algorithms need to know of a graph: decoder blocks, layers that read the same value, and
where a factor can be folded.

It follows from the traced graph alone, for any architecture. A config may name parts of it.
Nothing is computed on weights.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from quantizer.graph.ir import Graph

_MIN_LAYERS = 2
"""How many multiplying layers a block has at least."""


@dataclass(frozen=True)
class ModuleBlock:
    """A run of nodes that repeats.

    Args:
        path: of its module.
        start: the index of its first node in `graph.nodes`.
        stop: the index after its last node.
    """

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """A layer in whose parameters each channel of a group's input can be divided by a factor,
    exactly.

    Args:
        kind: "norm" divides the parameters `weight` and `bias` of a normalization, or the
            factor of a decomposed one (a "parameter" or "constant" node). "layer" divides the
            rows of a linear or convolution layer, and its bias.
        node: whose parameters are divided.
        channels: for each channel of the group's input the output channel of `node` that it
            comes from; None where they are the same. Channels with one origin must have one
            factor.
        offset: what is added to the parameter before it multiplies (1 for norms that keep
            weight - 1).
        extra: linear layers outside the group that read the same value. Their columns are
            multiplied as well.
    """

    kind: Literal["norm", "layer"]
    node: str
    channels: tuple[int, ...] | None = None
    offset: float = 0.0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputGroup:
    """Layers with weights that multiply one value.

    Args:
        source: the node whose value they read.
        layers: linear and convolution layers in execution order. An algorithm rounds those that
            the plan quantizes.
        axis: of the value, along which its channels are (-1 for linear layers).
        channels: how many there are.
        block: index into `Structure.blocks`; None outside.
        fold: None where only an explicit multiplication is exact.
        why_not: the reason why there is no fold.
        tied: nodes outside the group that have the weight of one of its layers: other columns
            need a copy of their own.
        is_fixed: whether its channels can be divided nowhere.
    """

    source: str
    layers: tuple[str, ...]
    axis: int
    channels: int
    block: int | None = None
    fold: Fold | None = None
    why_not: str = ""
    tied: tuple[str, ...] = ()
    is_fixed: bool = False


@dataclass(frozen=True)
class Structure:
    """Blocks and groups in execution order. A layer is in one group at most."""

    blocks: tuple[ModuleBlock, ...]
    groups: tuple[InputGroup, ...]


def find_blocks(graph: Graph) -> tuple[ModuleBlock, ...]:
    """Return the blocks of the containers with most layers, in execution order; none if nothing
    repeats.
    """
    chosen: list[ModuleBlock] = []
    containers: list[str] = []
    for container in _containers(graph):
        if any(_is_nested(container, other) for other in containers):
            continue
        blocks = [*chosen, *blocks_of(graph, container, _MIN_LAYERS)]
        blocks.sort(key=lambda block: block.start)
        pairs = itertools.pairwise(blocks)
        if all(before.stop <= after.start for before, after in pairs):
            chosen = blocks
            containers.append(container)
    return tuple(chosen)


def _containers(graph: Graph) -> list[str]:
    """Return the modules whose numbered children repeat, those with most layers first."""
    layers: dict[str, Counter[str]] = {}
    classes: dict[str, str] = {}
    for node in graph.nodes:
        names = node.scope.split(".") if node.scope else []
        for depth, name in enumerate(names):
            container = ".".join(names[:depth])
            layers.setdefault(container, Counter())[name] += node.is_multiplying
            classes[f"{container}.{name}"] = node.classes[len(names) - 1 - depth]
    sizes: dict[str, int] = {}
    for container, counts in layers.items():
        children: list[str] = []
        for name, count in counts.items():
            if count >= _MIN_LAYERS and name[-1].isdecimal():
                children.append(name)
        kinds = {classes[f"{container}.{name}"] for name in children}
        if len(children) > 1 and len(kinds) == 1:
            sizes[container] = sum(counts[name] for name in children)
    return sorted(sizes, key=sizes.__getitem__, reverse=True)


def blocks_of(graph: Graph, container: str, least: int = 1) -> tuple[ModuleBlock, ...]:
    """Return the runs of nodes of a container's children in execution order.

    Args:
        graph: the traced network.
        container: the path of the module.
        least: how many multiplying layers a child has at least.
    """
    prefix = f"{container}." if container else ""
    runs: dict[str, list[int]] = {}
    layers: Counter[str] = Counter()
    for index, node in enumerate(graph.nodes):
        if node.scope.startswith(prefix) and node.scope != container:
            child = node.scope.removeprefix(prefix).split(".")[0]
            runs.setdefault(child, []).append(index)
            layers[child] += node.is_multiplying
    blocks: list[ModuleBlock] = []
    for child, run in runs.items():
        if layers[child] >= least:
            blocks.append(ModuleBlock(prefix + child, run[0], run[-1] + 1))
    return tuple(blocks)


def _is_nested(one: str, other: str) -> bool:
    if "" in (one, other):
        return True
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
