"""The blocks of a network: runs of nodes whose modules stand side by side in one container and have one class."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from quantizer.graph.ir import Graph
from quantizer.graph.structure import ModuleBlock

_LAYERS = 2  # that a block has at least


def find_blocks(graph: Graph) -> tuple[ModuleBlock, ...]:
    """Blocks in execution order, of the containers with most layers; none where nothing repeats."""
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
        large = [child for child in children if children[child] >= _LAYERS and child[-1].isdecimal()]
        if len(large) > 1 and len({classes[container, child] for child in large}) == 1:
            sizes[container] = sum(children[child] for child in large)
    chosen: list[ModuleBlock] = []
    taken: list[str] = []
    for container in sorted(sizes, key=lambda each: -sizes[each]):
        found = blocks_of(graph, container, _LAYERS)
        if not any(_nested(container, other) for other in taken) and not _overlap((*chosen, *found)):
            chosen += found
            taken.append(container)
    return tuple(sorted(chosen, key=lambda block: block.start))


def blocks_of(graph: Graph, container: str, least: int = 1) -> tuple[ModuleBlock, ...]:
    """The run of nodes of each child of a container that has at least so many layers, in execution order."""
    prefix = f"{container}." if container else ""
    runs: dict[str, list[int]] = {}
    layers: Counter[str] = Counter()
    for at, node in enumerate(graph.nodes):
        if node.scope.startswith(prefix) and node.scope != container:
            path = prefix + node.scope[len(prefix) :].split(".")[0]
            runs.setdefault(path, []).append(at)
            layers[path] += node.is_multiplying
    return tuple(ModuleBlock(path, run[0], run[-1] + 1) for path, run in runs.items() if layers[path] >= least)


def _nested(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") or "" in (one, other)


def _overlap(blocks: Sequence[ModuleBlock]) -> bool:
    ordered = sorted(blocks, key=lambda block: block.start)
    return any(before.stop > after.start for before, after in itertools.pairwise(ordered))
