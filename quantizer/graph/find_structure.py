"""The structure of a traced graph: its blocks, the layers that read one value, and where each
value's channels fold.

What a config says of it is held against what the graph shows; every name is checked, all at
once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from quantizer.config.diagnostics import ConfigError, Diagnostic, Place
from quantizer.config.model import Names, ScalingLayer
from quantizer.config.wording import closest, listed
from quantizer.graph.edits import channels_of
from quantizer.graph.folds import Folds
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import BlockNames, module_of, module_paths
from quantizer.graph.structure import InputGroup, ModuleBlock, Structure, blocks_of, find_blocks

_SHOWN = 6  # names that a help line lists where none is close


def find_structure(graph: Graph, names: Names | None = None) -> Structure:
    """Blocks, and groups in the order in which their values are made; `names` override what the
    graph shows.

    The graph is that after the passes.

    Raises:
        ConfigError: a name that the graph does not have, or that does not fit; all of them at
            once.
    """
    folds = Folds(graph)
    found = Structure(find_blocks(graph), input_groups(graph))
    named = found
    if names is not None:
        reading = _Reading(folds, found, names)
        named = reading.structure()
        if reading.problems:
            raise ConfigError(tuple(dict.fromkeys(reading.problems)))
    return Structure(
        named.blocks, tuple(_completed(folds, named.blocks, group) for group in named.groups)
    )


def input_groups(graph: Graph) -> tuple[InputGroup, ...]:
    """All layers that multiply, by the value that they read and the axis of its channels; no
    more of the groups.
    """
    layers: dict[tuple[tuple[str, ...], int, int], list[str]] = {}
    for node in graph.nodes:
        if node.is_multiplying:
            _, inputs = channels_of(node, graph.weight(node))
            layers.setdefault(
                (tuple(node.operands.values()), node.row.channels or 0, inputs), []
            ).append(node.name)
    found = (
        InputGroup(read[0], tuple(names), axis, size)
        for (read, axis, size), names in layers.items()
    )
    return tuple(sorted(found, key=lambda group: graph.index[group.source]))


def _completed(folds: Folds, blocks: Sequence[ModuleBlock], group: InputGroup) -> InputGroup:
    """The group with its fold, who shares its weights, and its block: the one that has all its
    layers.
    """
    graph = folds.graph
    weights = {graph.by_name[layer].params["weight"] for layer in group.layers}
    shared = {path for path in weights if graph.uses[path] > 1}
    readers = graph.nodes if shared else ()
    tied = tuple(
        n.name
        for n in readers
        if n.name not in group.layers and n.params.get("weight") in shared
    )
    at = [graph.index[layer] for layer in group.layers]
    homes = {
        next((n for n, block in enumerate(blocks) if block.start <= each < block.stop), None)
        for each in at
    }
    return folds.folded(
        replace(group, tied=tied, block=homes.pop() if len(homes) == 1 else None)
    )


class _Reading:
    """One config's names on one graph; collects what is wrong with them, each at the `place`
    that is being read.
    """

    def __init__(self, folds: Folds, found: Structure, names: Names) -> None:
        self.folds, self.graph, self.found, self.names = folds, folds.graph, found, names
        self.problems: list[Diagnostic] = []
        self.place: Place | None = None
        self.paths = module_paths(self.graph)
        self.group_of = {layer: group for group in found.groups for layer in group.layers}

    def structure(self) -> Structure:
        """The blocks and groups that the names ask for, where they fit the graph; folds are yet
        to be found.
        """
        self.place = self.names.places.get("embeddings")
        for path in self.names.embeddings or ():
            if path not in self.paths:
                self._unknown(path, self.paths, "the model has")
        blocks, groups = self._blocks(), self.found.groups
        read = [BlockNames(self.graph, block.path) for block in blocks]
        if blocks and self.names.inside is not None:
            groups = self._inside(blocks[0], read, self.names.inside)
        if blocks and self.names.scaling is not None:
            groups = self._scaling(read, self.names.scaling)
        return Structure(blocks, groups)

    def _blocks(self) -> tuple[ModuleBlock, ...]:
        path = self.names.blocks
        if path is None:
            field = next(
                (key for key in ("inside", "scaling") if getattr(self.names, key) is not None),
                None,
            )
            if field and not self.found.blocks:
                self.place = self.names.places.get(field)
                text = (
                    "the graph shows no blocks that repeat, so names relative to a block "
                    "find nothing"
                )
                self._report(
                    "QZ502",
                    text,
                    "name the module that holds the blocks in model_decoder_layers",
                )
            return self.found.blocks
        self.place, blocks = self.names.places.get("blocks"), blocks_of(self.graph, path)
        if path not in self.paths:
            self._unknown(path, self.paths, "the model has")
        elif not blocks:
            known = listed(
                dict.fromkeys(block.path.rpartition(".")[0] for block in self.found.blocks)
            )
            shown = f"the graph shows blocks in {known}"
            remedy = (
                shown if known else "leave the key out: the graph shows no blocks that repeat"
            )
            self._report(
                "QZ502", f"{path} holds no modules with linear or convolution layers", remedy
            )
        return blocks

    def _inside(
        self, block: ModuleBlock, read: Sequence[BlockNames], wanted: Sequence[str]
    ) -> tuple[InputGroup, ...]:
        """The groups of these layers alone, each in the order of the list."""
        self.place = self.names.places.get("inside")
        rank: dict[str, int] = {}
        for at, name in enumerate(wanted):
            layers = [
                layer
                for names in read
                for each in names.layers(name).values()
                for layer in each
            ]
            if not layers:
                self._unknown(name, _relative(read), "a block has")
            for layer in layers:
                rank.setdefault(layer, at)
        groups = []
        for group in self.found.groups:
            layers = sorted(
                (layer for layer in group.layers if layer in rank), key=rank.__getitem__
            )
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
        """A layer is rounded on what those before it make, so the list follows the network."""
        inside = {node.name for node in self.graph.nodes[block.start : block.stop]}
        run = [[rank[layer] for layer in group.layers if layer in inside] for group in groups]
        firsts = [ranks[0] for ranks in run if ranks]
        if firsts != sorted(firsts):
            order = listed(dict.fromkeys(wanted[at] for ranks in run for at in ranks))
            self._report(
                "QZ503",
                f"the layers of {block.path} run in another order",
                f"list them as they run: {order}",
            )

    def _scaling(
        self, read: Sequence[BlockNames], entries: Sequence[ScalingLayer]
    ) -> tuple[InputGroup, ...]:
        """A group for each entry and each value that its layers read."""
        taken: set[str] = set()
        groups: list[InputGroup] = []
        for entry in entries:
            self.place = entry.place or self.names.places.get("scaling")
            self._check_names(entry, read)
            found = self._groups(entry, read)
            if twice := [layer for group in found for layer in group.layers if layer in taken]:
                self._report(
                    "QZ504",
                    f"{module_of(self.graph, twice[0])} is in two entries",
                    "list it once",
                )
            taken.update(layer for group in found for layer in group.layers)
            groups += found
        return tuple(sorted(groups, key=lambda group: self.graph.index[group.source]))

    def _check_names(self, entry: ScalingLayer, blocks: Sequence[BlockNames]) -> None:
        """Each name is found in at least one block."""
        for name in entry.layers:
            if not any(block.layers(name) for block in blocks):
                self._unknown(name, _relative(blocks), "a block has")
        for name in filter(None, (entry.prev_op, entry.inp)):
            if not any(block.modules(name, "") for block in blocks):
                self._unknown(name, _relative(blocks, modules=True), "a block has")

    def _groups(self, entry: ScalingLayer, blocks: Sequence[BlockNames]) -> list[InputGroup]:
        """The entry's groups: those of experts that read one value are one."""
        by_value: dict[tuple[str, int], list[str]] = {}
        for block in blocks:
            for prefix, layers in block.sets(entry.layers).items():
                if not self._fits(entry, block, prefix, layers):
                    return []  # it is the same in the other blocks
                group = self.group_of[layers[0]]
                by_value.setdefault((group.source, group.axis), []).extend(layers)
        found = (tuple(dict.fromkeys(layers)) for layers in by_value.values())
        return [replace(self.group_of[layers[0]], layers=layers) for layers in found]

    def _fits(
        self, entry: ScalingLayer, block: BlockNames, prefix: str, layers: Sequence[str]
    ) -> bool:
        """Whether the layers read one value, `inp` as well, and `prev_op` makes it."""
        source, first = self.group_of[layers[0]].source, module_of(self.graph, layers[0])
        multiplying = [node for node in self.graph.nodes if node.is_multiplying]
        beside = [
            n.name
            for path in block.modules(entry.inp, prefix)
            for n in multiplying
            if n.scope == path
        ]
        for layer in (*layers, *beside):
            if self.group_of[layer].source != source:
                text = f"{module_of(self.graph, layer)} does not read what {first} reads"
                self._report(
                    "QZ504",
                    text,
                    "layers of one entry read one value; make an entry of each value",
                )
                return False
        before = block.modules(entry.prev_op, prefix)
        way = {module_of(self.graph, name) for name in self.folds.way_back(source)}
        if before and not any(
            f"{module}.".startswith(f"{path}.") for module in way for path in before
        ):
            sources, why = self.folds.sources(source)
            makers = listed(module_of(self.graph, each.node.name) for each in sources)
            remedy = f"it reads what {makers} makes" if makers else why
            self._report("QZ505", f"{before[0]} does not make what {first} reads", remedy)
            return False
        return True

    def _unknown(self, name: str, known: Iterable[str], has: str) -> None:
        known = sorted(path for path in known if path)
        near = closest(name, known)
        shown = listed(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        self._report(
            "QZ501",
            f"there is no module {name!r}",
            f"did you mean {near!r}?" if near else f"{has} {shown}",
        )

    def _report(self, code: str, message: str, remedy: str | None) -> None:
        self.problems.append(Diagnostic(code, message, self.place, help=remedy))


def _relative(blocks: Sequence[BlockNames], *, modules: bool = False) -> list[str]:
    return list(
        dict.fromkeys(name for block in blocks for name in block.known(modules=modules))
    )
