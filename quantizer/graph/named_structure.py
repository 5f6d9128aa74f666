"""What a config says of a model's structure, held against what its graph shows; every name is checked, all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from quantizer.config.diagnostics import ConfigError, Diagnostic, Place
from quantizer.config.model import Names, ScalingLayer
from quantizer.config.wording import closest, listed
from quantizer.graph.blocks import blocks_of
from quantizer.graph.folds import Folds
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import BlockNames, module_of, module_paths
from quantizer.graph.structure import InputGroup, ModuleBlock, Structure

_SHOWN = 6  # names that a help line lists where none is close


def named_structure(folds: Folds, found: Structure, names: Names) -> Structure:
    """The blocks and groups that `names` ask for, where they fit the graph; folds are yet to be found.

    Raises:
        ConfigError: with all names that the graph does not have and all that do not fit.
    """
    reading = _Reading(folds, found, names)
    structure = reading.structure()
    if reading.problems:
        raise ConfigError(tuple(dict.fromkeys(reading.problems)))
    return structure


class _Reading:
    """One config's names on one graph; collects what is wrong with them."""

    def __init__(self, folds: Folds, found: Structure, names: Names) -> None:
        self.folds, self.graph, self.found, self.names = folds, folds.graph, found, names
        self.problems: list[Diagnostic] = []
        self.paths = module_paths(self.graph)
        self.group_of = {layer: group for group in found.groups for layer in group.layers}

    def structure(self) -> Structure:
        for path in self.names.embeddings or ():
            if path not in self.paths:
                self._unknown(path, self.paths, self.names.places.get("embeddings"), "the model has")
        blocks = self._blocks()
        groups = self.found.groups
        if blocks and self.names.inside is not None:
            groups = self._inside(blocks, self.names.inside)
        if blocks and self.names.scaling is not None:
            groups = self._scaling(blocks, self.names.scaling)
        return Structure(blocks, groups)

    def _blocks(self) -> tuple[ModuleBlock, ...]:
        path = self.names.blocks
        if path is None:
            field = next((key for key in ("inside", "scaling") if getattr(self.names, key) is not None), None)
            if field and not self.found.blocks:
                self._report(
                    "QZ502",
                    "the graph shows no blocks that repeat, so names relative to a block find nothing",
                    self.names.places.get(field),
                    "name the module that holds the blocks in model_decoder_layers",
                )
            return self.found.blocks
        blocks = blocks_of(self.graph, path)
        if path not in self.paths:
            self._unknown(path, self.paths, self.names.places.get("blocks"), "the model has")
        elif not blocks:
            known = listed(dict.fromkeys(block.path.rpartition(".")[0] for block in self.found.blocks))
            self._report(
                "QZ502",
                f"{path} holds no modules with linear or convolution layers",
                self.names.places.get("blocks"),
                f"the graph shows blocks in {known}"
                if known
                else "leave the key out: the graph shows no blocks that repeat",
            )
        return blocks

    def _inside(self, blocks: Sequence[ModuleBlock], wanted: Sequence[str]) -> tuple[InputGroup, ...]:
        """The groups of these layers alone, each in the order of the list."""
        place = self.names.places.get("inside")
        rank: dict[str, int] = {}
        read = [BlockNames(self.graph, block.path) for block in blocks]
        for at, name in enumerate(wanted):
            layers = [layer for block in read for each in block.layers(name).values() for layer in each]
            if not layers:
                self._unknown(name, _relative(read), place, "a block has")
            for layer in layers:
                rank.setdefault(layer, at)
        groups = []
        for group in self.found.groups:
            layers = sorted((layer for layer in group.layers if layer in rank), key=rank.__getitem__)
            if layers:
                groups.append(replace(group, layers=tuple(layers)))
        self._check_order(blocks[0], groups, rank, wanted, place)
        return tuple(groups)

    def _check_order(
        self,
        block: ModuleBlock,
        groups: Iterable[InputGroup],
        rank: Mapping[str, int],
        wanted: Sequence[str],
        place: Place | None,
    ) -> None:
        """A layer is rounded on what those before it make, so the list follows the network."""
        inside = {node.name for node in self.graph.nodes[block.start : block.stop]}
        run = [[rank[layer] for layer in group.layers if layer in inside] for group in groups]
        firsts = [ranks[0] for ranks in run if ranks]
        if firsts != sorted(firsts):
            order = dict.fromkeys(wanted[at] for ranks in run for at in ranks)
            self._report(
                "QZ503",
                f"the layers of {block.path} run in another order",
                place,
                f"list them as they run: {listed(order)}",
            )

    def _scaling(self, blocks: Sequence[ModuleBlock], entries: Sequence[ScalingLayer]) -> tuple[InputGroup, ...]:
        """A group for each entry and each value that its layers read."""
        read = [BlockNames(self.graph, block.path) for block in blocks]
        taken: set[str] = set()
        groups: list[InputGroup] = []
        for entry in entries:
            place = entry.place or self.names.places.get("scaling")
            self._check_names(entry, read, place)
            found = self._groups(entry, read, place)
            if twice := [layer for group in found for layer in group.layers if layer in taken]:
                self._report("QZ504", f"{module_of(self.graph, twice[0])} is in two entries", place, "list it once")
            taken.update(layer for group in found for layer in group.layers)
            groups += found
        index = {node.name: at for at, node in enumerate(self.graph.nodes)}
        return tuple(sorted(groups, key=lambda group: index[group.source]))

    def _check_names(self, entry: ScalingLayer, blocks: Sequence[BlockNames], place: Place | None) -> None:
        """Each name is found in at least one block."""
        for name in entry.layers:
            if not any(block.layers(name) for block in blocks):
                self._unknown(name, _relative(blocks), place, "a block has")
        for name in filter(None, (entry.prev_op, entry.inp)):
            if not any(block.modules(name, "") for block in blocks):
                self._unknown(name, _relative(blocks, modules=True), place, "a block has")

    def _groups(self, entry: ScalingLayer, blocks: Sequence[BlockNames], place: Place | None) -> list[InputGroup]:
        """The entry's groups: those of experts that read one value are one."""
        by_value: dict[tuple[str, int], list[str]] = {}
        for block in blocks:
            for prefix, layers in block.sets(entry.layers).items():
                if not self._fits(entry, block, prefix, layers, place):
                    return []  # it is the same in the other blocks
                group = self.group_of[layers[0]]
                by_value.setdefault((group.source, group.axis), []).extend(layers)
        found = (tuple(dict.fromkeys(layers)) for layers in by_value.values())
        return [replace(self.group_of[layers[0]], layers=layers) for layers in found]

    def _fits(
        self, entry: ScalingLayer, block: BlockNames, prefix: str, layers: Sequence[str], place: Place | None
    ) -> bool:
        """Whether the layers read one value, `inp` as well, and `prev_op` makes it."""
        source = self.group_of[layers[0]].source
        inputs = [name for path in block.modules(entry.inp, prefix) for name in _layers_in(self.graph, path)]
        for layer in (*layers, *inputs):
            if self.group_of[layer].source != source:
                self._report(
                    "QZ504",
                    f"{module_of(self.graph, layer)} does not read what {module_of(self.graph, layers[0])} reads",
                    place,
                    "layers of one entry read one value; make an entry of each value",
                )
                return False
        before = block.modules(entry.prev_op, prefix)
        way = {module_of(self.graph, name) for name in self.folds.way_back(source)}
        if before and not any(f"{module}.".startswith(f"{path}.") for module in way for path in before):
            sources, why = self.folds.sources(source)
            makers = listed(module_of(self.graph, each.node.name) for each in sources)
            self._report(
                "QZ505",
                f"{before[0]} does not make what {module_of(self.graph, layers[0])} reads",
                place,
                f"it reads what {makers} makes" if makers else why,
            )
            return False
        return True

    def _unknown(self, name: str, known: Iterable[str], place: Place | None, has: str) -> None:
        known = sorted(path for path in known if path)
        near = closest(name, known)
        shown = listed(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        self._report(
            "QZ501", f"there is no module {name!r}", place, f"did you mean {near!r}?" if near else f"{has} {shown}"
        )

    def _report(self, code: str, message: str, place: Place | None, remedy: str | None) -> None:
        self.problems.append(Diagnostic(code, message, place, help=remedy))


def _relative(blocks: Sequence[BlockNames], *, modules: bool = False) -> list[str]:
    return list(dict.fromkeys(name for block in blocks for name in block.known(modules=modules)))


def _layers_in(graph: Graph, path: str) -> list[str]:
    return [node.name for node in graph.nodes if node.is_multiplying and node.scope == path]
