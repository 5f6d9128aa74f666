"""What algorithms want to know of a graph: decoder blocks, layers that read one value, and
where a factor can go.

Found on the traced graph alone, for any architecture; a config may name parts of it. Computes
nothing on weights.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from quantizer.graph.ir import Graph

_LAYERS = 2  # that a block has at least


@dataclass(frozen=True)
class ModuleBlock:
    """A run of nodes that repeats: `path` is its module's, `start` and `stop` are indices into
    `graph.nodes`.
    """

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """Where each channel of a group's input can be divided by a factor, exactly: in the
    parameters of one layer.

    Args:
        kind: "norm" divides the parameters `weight` and, where there is one, `bias` of a
            normalization (or the factor of a decomposed one, a "parameter" or "constant" node);
            "layer" the rows of a linear or convolution layer and its bias.
        node: whose parameters are divided.
        channels: for each channel of the group's input the output channel of `node` that it
            comes from; None where they are the same. Channels with one origin must have one
            factor.
        offset: what is added to the parameter before it multiplies (1 for norms that keep
            weight - 1).
        extra: linear layers that read the same value and are not in the group: their columns
            are multiplied as well.
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
        layers: linear and convolution layers in execution order; an algorithm rounds those that
            the plan quantizes.
        axis: of the value, along which its channels lie (-1 for linear layers).
        channels: how many there are.
        block: index into `Structure.blocks`; None outside.
        fold: None where only an explicit multiplication is exact; `why_not` says why.
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
    """Blocks in execution order, of the containers with most layers; none where nothing
    repeats.
    """
    layers: dict[str, Counter[str]] = {}
    classes: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        parts = node.scope.split(".") if node.scope else []
        for depth in range(len(parts)):
            container, child = ".".join(parts[:depth]), parts[depth]
            layers.setdefault(container, Counter())[child] += node.is_multiplying
            classes[container, child] = node.classes[len(parts) - 1 - depth]
    sizes: dict[str, int] = {}
    for container, children in layers.items():
        large = [
            child for child in children if children[child] >= _LAYERS and child[-1].isdecimal()
        ]
        if len(large) > 1 and len({classes[container, child] for child in large}) == 1:
            sizes[container] = sum(children[child] for child in large)
    chosen: list[ModuleBlock] = []
    taken: list[str] = []
    for container in sorted(sizes, key=lambda each: -sizes[each]):
        both = sorted(
            (*chosen, *blocks_of(graph, container, _LAYERS)), key=lambda block: block.start
        )
        apart = all(before.stop <= after.start for before, after in itertools.pairwise(both))
        if apart and not any(_nested(container, other) for other in taken):
            chosen = both
            taken.append(container)
    return tuple(chosen)


def blocks_of(graph: Graph, container: str, least: int = 1) -> tuple[ModuleBlock, ...]:
    """The run of nodes of each child of a container that has at least so many layers, in
    execution order.
    """
    prefix = f"{container}." if container else ""
    runs: dict[str, list[int]] = {}
    layers: Counter[str] = Counter()
    for at, node in enumerate(graph.nodes):
        if node.scope.startswith(prefix) and node.scope != container:
            path = prefix + node.scope[len(prefix) :].split(".")[0]
            runs.setdefault(path, []).append(at)
            layers[path] += node.is_multiplying
    return tuple(
        ModuleBlock(path, run[0], run[-1] + 1)
        for path, run in runs.items()
        if layers[path] >= least
    )


def _nested(one: str, other: str) -> bool:
    return (
        f"{one}.".startswith(f"{other}.")
        or f"{other}.".startswith(f"{one}.")
        or "" in (one, other)
    )
