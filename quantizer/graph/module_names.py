"""The modules of a traced model by their dotted paths, and names relative to one block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from quantizer.graph.ir import Graph


def module_of(graph: Graph, name: str) -> str:
    """The module that a node ran in; of a trained tensor the module that has it."""
    node = graph.by_name[name]
    if node.op in ("parameter", "constant"):
        return node.params["weight"].rpartition(".")[0]
    return node.scope


def module_paths(graph: Graph) -> frozenset[str]:
    """Every module that runs an operator or has a tensor, and those around it."""
    paths = {node.scope for node in graph.nodes} | {path.rpartition(".")[0] for path in graph.tensors}
    return frozenset(
        ".".join(parts[:depth]) for parts in (path.split(".") for path in paths) for depth in range(1, len(parts) + 1)
    )


class BlockNames:
    """Names relative to the block at `path`; one that is no path there is the end of several, as those of experts."""

    def __init__(self, graph: Graph, path: str) -> None:
        self._path = path
        self._modules = sorted(each for each in module_paths(graph) if each.startswith(f"{path}."))
        self._layers: dict[str, list[str]] = {}
        for node in graph.nodes:
            if node.is_multiplying and f"{node.scope}.".startswith(f"{path}."):
                self._layers.setdefault(node.scope, []).append(node.name)

    def known(self, *, modules: bool = False) -> list[str]:
        """The relative paths of the layers, or of all modules."""
        return [each[len(self._path) + 1 :] for each in (self._modules if modules else self._layers)]

    def layers(self, name: str) -> dict[str, list[str]]:
        """The layers called `name`, by the path of the module to which that is relative: the block, or experts."""
        exact = f"{self._path}.{name}"
        if exact in self._layers:
            return {self._path: self._layers[exact]}
        return {path[: -len(name) - 1]: found for path, found in self._layers.items() if path.endswith(f".{name}")}

    def sets(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The layers of several names, those of each expert for themselves."""
        found: dict[str, list[str]] = {}
        for name in names:
            for prefix, layers in self.layers(name).items():
                found.setdefault(prefix, []).extend(layers)
        return found

    def modules(self, name: str, prefix: str) -> list[str]:
        """Paths of the modules called `name` in the expert at `prefix`, else in the block, else in any expert."""
        if not name:
            return []
        for start in (prefix, self._path):
            if start and f"{start}.{name}" in self._all:
                return [f"{start}.{name}"]
        return [path for path in self._modules if path.endswith(f".{name}")]

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(self._modules)
