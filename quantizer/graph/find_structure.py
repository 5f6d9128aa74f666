"""The structure of a traced graph: its blocks, the layers that read one value, and where each value's channels fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantizer.config.model import Names
from quantizer.graph.blocks import find_blocks
from quantizer.graph.folds import Folds
from quantizer.graph.ir import Graph, Node
from quantizer.graph.named_structure import named_structure
from quantizer.graph.structure import InputGroup, ModuleBlock, Structure
from quantizer.graph.weights import by_channel


def find_structure(graph: Graph, names: Names | None = None) -> Structure:
    """Blocks, and groups in the order in which their values are made; `names` override what the graph shows.

    The graph is that after the passes.

    Raises:
        ConfigError: a name that the graph does not have, or that does not fit; all of them at once.
    """
    folds = Folds(graph)
    found = Structure(find_blocks(graph), input_groups(graph))
    named = found if names is None else named_structure(folds, found, names)
    groups = (replace(group, tied=_tied(graph, group.layers)) for group in named.groups)
    return Structure(named.blocks, tuple(folds.folded(_in_block(graph, named.blocks, group)) for group in groups))


def input_groups(graph: Graph) -> tuple[InputGroup, ...]:
    """All layers that multiply, by the value that they read, and no more of the groups."""
    by_source: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.is_multiplying:
            by_source.setdefault(node.inputs["input"].name, []).append(node)
    order = [node.name for node in graph.nodes if node.name in by_source]
    return tuple(group for name in order for group in _by_axis(graph, name, by_source[name]))


def _by_axis(graph: Graph, source: str, layers: Sequence[Node]) -> list[InputGroup]:
    """A group, or one for each axis along which the layers of one value find their channels."""
    by_axis: dict[tuple[int, int], list[str]] = {}
    for node in layers:
        table = by_channel(node, graph.tensors[node.params["weight"]])
        by_axis.setdefault((node.row.channels or 0, table.shape[0] * table.shape[2]), []).append(node.name)
    return [InputGroup(source, tuple(names), axis, channels) for (axis, channels), names in by_axis.items()]


def _tied(graph: Graph, layers: Sequence[str]) -> tuple[str, ...]:
    weights = {graph.by_name[layer].params["weight"] for layer in layers}
    return tuple(n.name for n in graph.nodes if n.name not in layers and n.params.get("weight") in weights)


def _in_block(graph: Graph, blocks: Sequence[ModuleBlock], group: InputGroup) -> InputGroup:
    """The group with its block: the one that has all its layers."""
    index = {node.name: at for at, node in enumerate(graph.nodes)}
    homes = {
        next((number for number, block in enumerate(blocks) if block.start <= index[layer] < block.stop), None)
        for layer in group.layers
    }
    return replace(group, block=homes.pop() if len(homes) == 1 else None)
