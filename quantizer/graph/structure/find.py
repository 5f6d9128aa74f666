"""Find the structure of a traced graph: its blocks, the layers that read one value, and where
each value's channels fold.

The names that a config gives are checked against the graph. All wrong names are reported at
once.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from quantizer.config.algorithms import ScalingLayer, StructureNames
from quantizer.config.diagnostics import ConfigError, Diagnostic, Place
from quantizer.config.wording import did_you_mean, listed
from quantizer.graph.edits import channels_of
from quantizer.graph.ir import Graph
from quantizer.graph.names import BlockNames, module_of, module_paths
from quantizer.graph.structure.definitions import InputGroup, ModuleBlock, Structure
from quantizer.graph.structure.folds import Folds

_MIN_LAYERS = 2
"""How many multiplying layers a block has at least."""
_MAX_SHOWN = 6
"""Names that a help line lists if none is close to the wrong one."""


def find_structure(graph: Graph, names: StructureNames | None = None) -> Structure:
    """Return the blocks, and the groups in the order in which their values are made.

    Args:
        graph: after the passes.
        names: of the config; they override what the graph shows.

    Raises:
        ConfigError: some names are not in the graph, or do not fit it.
    """
    folds = Folds(graph)
    structure = Structure(find_blocks(graph), _input_groups(graph))
    if names is not None:
        resolver = _NameResolver(folds, structure, names)
        structure = resolver.structure()
        if resolver.problems:
            raise ConfigError(tuple(dict.fromkeys(resolver.problems)))
    groups = [_completed(folds, structure.blocks, group) for group in structure.groups]
    return Structure(structure.blocks, tuple(groups))


def _input_groups(graph: Graph) -> tuple[InputGroup, ...]:
    """Return the multiplying layers grouped by the value that they read and the axis of its
    channels.
    """
    groups: dict[tuple[tuple[str, ...], int, int], InputGroup] = {}
    for node in graph.nodes:
        if not node.is_multiplying:
            continue
        operands = tuple(node.operands.values())
        axis = node.row.channels or 0
        _, channels = channels_of(node, graph.weight(node))
        key = (operands, axis, channels)
        group = groups.get(key) or InputGroup(operands[0], (), axis, channels)
        groups[key] = replace(group, layers=(*group.layers, node.name))
    return _in_order(graph, groups.values())


def _in_order(graph: Graph, groups: Iterable[InputGroup]) -> tuple[InputGroup, ...]:
    """Return groups in the order in which their values are made."""
    return tuple(sorted(groups, key=lambda group: graph.index[group.source]))


def _completed(folds: Folds, blocks: Sequence[ModuleBlock], group: InputGroup) -> InputGroup:
    """Return a group with its fold, the layers that share its weights, and the block that
    contains all its layers.
    """
    graph = folds.graph
    weights = {graph.by_name[layer].params["weight"] for layer in group.layers}
    shared = {path for path in weights if graph.uses[path] > 1}
    tied: list[str] = []
    if shared:
        for node in graph.nodes:
            if node.name not in group.layers and node.params.get("weight") in shared:
                tied.append(node.name)
    homes = {_block_at(blocks, graph.index[layer]) for layer in group.layers}
    home = homes.pop() if len(homes) == 1 else None
    return folds.folded(replace(group, tied=tuple(tied), block=home))


def _block_at(blocks: Sequence[ModuleBlock], index: int) -> int | None:
    """Return the number of the block that contains a node, None outside blocks."""
    for number, block in enumerate(blocks):
        if block.start <= index < block.stop:
            return number
    return None


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


class _NameResolver:
    """Resolves one config's names on one graph.

    Attributes:
        problems: what is wrong with the names.
        place: of the names that are being resolved.
    """

    def __init__(self, folds: Folds, shown: Structure, names: StructureNames) -> None:
        self.folds = folds
        self.graph = folds.graph
        self.shown = shown
        self.names = names
        self.problems: list[Diagnostic] = []
        self.place: Place | None = None
        self.paths = module_paths(self.graph)
        self.group_of: dict[str, InputGroup] = {}
        for group in shown.groups:
            for layer in group.layers:
                self.group_of[layer] = group

    def structure(self) -> Structure:
        """Return the blocks and groups for which the names ask, where they fit the graph, still
        without folds.
        """
        self.place = self.names.places.get("embeddings")
        for path in self.names.embeddings or ():
            if path not in self.paths:
                self._report_unknown(path, self.paths, "the model has")
        blocks = self._blocks()
        groups = self.shown.groups
        block_names = [BlockNames(self.graph, block.path) for block in blocks]
        if blocks and self.names.inside is not None:
            groups = self._inside(blocks[0], block_names, self.names.inside)
        if blocks and self.names.scaling is not None:
            groups = self._scaling(block_names, self.names.scaling)
        return Structure(blocks, groups)

    def _blocks(self) -> tuple[ModuleBlock, ...]:
        path = self.names.blocks
        if path is None:
            self._check_that_blocks_repeat()
            return self.shown.blocks
        self.place = self.names.places.get("blocks")
        blocks = blocks_of(self.graph, path)
        if path not in self.paths:
            self._report_unknown(path, self.paths, "the model has")
        elif not blocks:
            containers = [block.path.rpartition(".")[0] for block in self.shown.blocks]
            known = listed(dict.fromkeys(containers))
            remedy = "leave the key out: the graph shows no blocks that repeat"
            if known:
                remedy = f"the graph shows blocks in {known}"
            text = f"{path} holds no modules with linear or convolution layers"
            self._report("QZ502", text, remedy)
        return blocks

    def _check_that_blocks_repeat(self) -> None:
        """Report names relative to a block if the graph shows no blocks."""
        for key in ("inside", "scaling"):
            if getattr(self.names, key) is not None and not self.shown.blocks:
                self.place = self.names.places.get(key)
                self._report(
                    "QZ502",
                    "the graph shows no blocks that repeat, so names relative to a block "
                    "find nothing",
                    "name the module that holds the blocks in model_decoder_layers",
                )
                return

    def _inside(
        self, block: ModuleBlock, block_names: Sequence[BlockNames], wanted: Sequence[str]
    ) -> tuple[InputGroup, ...]:
        """Return the groups of these layers alone, each in the order of the list.

        Args:
            block: the first one, in which the order of the list is checked.
            block_names: of all blocks.
            wanted: names of layers relative to a block.
        """
        self.place = self.names.places.get("inside")
        rank: dict[str, int] = {}
        for number, name in enumerate(wanted):
            layers = list(_layers_called(block_names, name))
            if not layers:
                self._report_unknown(name, _relative(block_names), "a block has")
            for layer in layers:
                rank.setdefault(layer, number)
        groups: list[InputGroup] = []
        for group in self.shown.groups:
            layers = [layer for layer in group.layers if layer in rank]
            layers.sort(key=rank.__getitem__)
            if layers:
                groups.append(replace(group, layers=tuple(layers)))
        self._check_order(block, groups, rank, wanted)
        return tuple(groups)

    def _check_order(
        self,
        block: ModuleBlock,
        groups: Iterable[InputGroup],
        rank: Mapping[str, int],
        wanted: Sequence[str],
    ) -> None:
        """Report a list that does not follow the network.

        A layer is rounded with the outputs of those before it, so the order matters.
        """
        inside = {node.name for node in self.graph.nodes[block.start : block.stop]}
        firsts: list[int] = []
        names: list[str] = []
        for group in groups:
            ranks = [rank[layer] for layer in group.layers if layer in inside]
            firsts += ranks[:1]
            names += [wanted[number] for number in ranks]
        if firsts != sorted(firsts):
            order = listed(dict.fromkeys(names))
            self._report(
                "QZ503",
                f"the layers of {block.path} run in another order",
                f"list them as they run: {order}",
            )

    def _scaling(
        self, block_names: Sequence[BlockNames], entries: Sequence[ScalingLayer]
    ) -> tuple[InputGroup, ...]:
        """Return a group for each entry and each value that its layers read."""
        taken: set[str] = set()
        groups: list[InputGroup] = []
        for entry in entries:
            self.place = entry.place or self.names.places.get("scaling")
            self._check_names(entry, block_names)
            layers: list[str] = []
            for group in self._groups(entry, block_names):
                groups.append(group)
                layers += group.layers
            repeated = [layer for layer in layers if layer in taken]
            if repeated:
                path = module_of(self.graph, repeated[0])
                self._report("QZ504", f"{path} is in two entries", "list it once")
            taken.update(layers)
        return _in_order(self.graph, groups)

    def _check_names(self, entry: ScalingLayer, blocks: Sequence[BlockNames]) -> None:
        """Report names that are in no block."""
        for name in entry.layers:
            if not any(block.layers(name) for block in blocks):
                self._report_unknown(name, _relative(blocks), "a block has")
        for name in (entry.prev_op, entry.inp):
            if name and not any(block.modules(name, "") for block in blocks):
                known = _relative(blocks, modules=True)
                self._report_unknown(name, known, "a block has")

    def _groups(self, entry: ScalingLayer, blocks: Sequence[BlockNames]) -> list[InputGroup]:
        """Return the entry's groups. Experts that read one value are in one group."""
        by_value: dict[tuple[str, int], dict[str, None]] = {}
        for block in blocks:
            for prefix, layers in block.sets(entry.layers).items():
                if not self._fits(entry, block, prefix, layers):
                    return []  # the other blocks would have the same problem
                group = self.group_of[layers[0]]
                group_layers = by_value.setdefault((group.source, group.axis), {})
                group_layers.update(dict.fromkeys(layers))
        groups: list[InputGroup] = []
        for names in by_value.values():
            group = self.group_of[next(iter(names))]
            groups.append(replace(group, layers=tuple(names)))
        return groups

    def _fits(
        self, entry: ScalingLayer, block: BlockNames, prefix: str, layers: Sequence[str]
    ) -> bool:
        """Return whether the layers and `inp` read one value, and `prev_op` makes it.

        Args:
            entry: of the config.
            block: in which its names are resolved.
            prefix: the path of the expert whose layers these are, or of the block.
            layers: of the entry.
        """
        source = self.group_of[layers[0]].source
        first = module_of(self.graph, layers[0])
        readers = list(layers)
        for path in block.modules(entry.inp, prefix):
            for node in self.graph.nodes:
                if node.is_multiplying and node.scope == path:
                    readers.append(node.name)
        for layer in readers:
            if self.group_of[layer].source != source:
                self._report(
                    "QZ504",
                    f"{module_of(self.graph, layer)} does not read what {first} reads",
                    "layers of one entry read one value; make an entry of each value",
                )
                return False
        makers = block.modules(entry.prev_op, prefix)
        if not makers or self._is_made_in(source, makers):
            return True
        sources, remedy = self.folds.sources(source)
        names = listed(module_of(self.graph, source.node.name) for source in sources)
        if names:
            remedy = f"it reads what {names} makes"
        self._report("QZ505", f"{makers[0]} does not make what {first} reads", remedy)
        return False

    def _is_made_in(self, source: str, modules: Iterable[str]) -> bool:
        """Return whether a node on the way back from a value is in one of these modules."""
        beginnings = tuple(f"{path}." for path in modules)
        for name in self.folds.way_back(source):
            if f"{module_of(self.graph, name)}.".startswith(beginnings):
                return True
        return False

    def _report_unknown(self, name: str, known: Iterable[str], owner: str) -> None:
        known = sorted(path for path in known if path)
        shown = listed(known[:_MAX_SHOWN])
        if len(known) > _MAX_SHOWN:
            shown += ", …"
        remedy = did_you_mean(name, known, f"{owner} {shown}")
        self._report("QZ501", f"there is no module {name!r}", remedy)

    def _report(self, code: str, message: str, remedy: str) -> None:
        self.problems.append(Diagnostic(code, message, self.place, help=remedy))


def _layers_called(blocks: Sequence[BlockNames], name: str) -> Iterator[str]:
    """Yield the layers of all blocks that have a name."""
    for block in blocks:
        for layers in block.layers(name).values():
            yield from layers


def _relative(blocks: Sequence[BlockNames], *, modules: bool = False) -> list[str]:
    """Return the relative paths of the layers, or modules, of all blocks, each once."""
    names: dict[str, None] = {}
    for block in blocks:
        names.update(dict.fromkeys(block.known(modules=modules)))
    return list(names)
