"""The modules of a traced model by their dotted paths, layers by those of their modules, names
relative to a block.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import around


def module_of(graph: Graph, name: str) -> str:
    """The module that a node ran in; of a trained tensor the module that has it."""
    node = graph.by_name[name]
    if node.op in ("parameter", "constant"):
        return node.params["weight"].rpartition(".")[0]
    return node.scope


def layer_path(node: Node) -> str:
    """The path that names a multiplying layer: its module's, or its tensor's in a module of
    experts, with several.
    """
    return call_paths(node.name, node.scope)[0] if node.row.experts else node.scope


def module_paths(graph: Graph) -> frozenset[str]:
    """Every module that runs an operator or has a tensor, and those around it."""
    paths = {node.scope for node in graph.nodes} | {
        path.rpartition(".")[0] for path in graph.tensors
    }
    return frozenset(each for path in paths for each in (path, *around(path)))


def path_names(graph: Graph) -> dict[str, str]:
    """What people call each layer: its module's path, and the operator where the module alone
    does not say which.

    A module alone stands for its only operator, or for the one with its weights. Later calls of
    a module keep their number (`layer1.0.relu.1`). Where two layers would be called alike, both
    keep their exact names.
    """
    paths = {node.name: module_of(graph, node.name) for node in graph.nodes}
    parents = {parent for path in paths.values() for parent in around(path)[:-1]}
    kinds, weights = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    owned = {node.name: weight for node in graph.nodes if (weight := _weight(node))}
    for name, path in paths.items():
        kinds[path].add(_operator(name).partition(".")[0])
        weights[path] |= {owned[name]} if name in owned else set()
    found = {}
    for name, path in paths.items():
        only = (
            len(weights[path]) == 1
            if name in owned
            else len(kinds[path]) == 1 and path not in parents
        )
        found[name] = call_paths(name, path)[bool(path) and only]
    counts = Counter(found.values())
    return {name: path if counts[path] == 1 else name for name, path in found.items()}


def _weight(node: Node) -> str | None:
    """The path of the first weight that the node computes with."""
    if node.op in ("parameter", "constant"):
        return None
    return next((path for key, path in node.params.items() if key.startswith("weight")), None)


def call_paths(name: str, path: str) -> tuple[str, str]:
    """A layer by the path of its module, with its operator and without.

    >>> call_paths("Net::Net/Sequential[layers]/ReLU[0]/relu.1", "layers.0")
    ('layers.0.relu.1', 'layers.0.1')
    """
    operator = _operator(name)
    again = "".join(operator.partition(".")[1:])
    return f"{path}.{operator}" if path else operator, f"{path}{again}"


def _operator(name: str) -> str:
    """The last part of a layer's name."""
    return name.rpartition("::")[2].rpartition("/")[2]


class BlockNames:
    """Names relative to the block at `path`; one that is no path there is the end of several,
    as those of experts.
    """

    def __init__(self, graph: Graph, path: str) -> None:
        self._path = path
        self._all = frozenset(
            each for each in module_paths(graph) if each.startswith(f"{path}.")
        )
        self._modules = sorted(self._all)
        self._layers: dict[str, list[str]] = {}
        for node in graph.nodes:
            if node.is_multiplying and f"{node.scope}.".startswith(f"{path}."):
                self._layers.setdefault(layer_path(node), []).append(node.name)

    def known(self, *, modules: bool = False) -> list[str]:
        """The relative paths of the layers, or of all modules."""
        return [
            each[len(self._path) + 1 :] for each in (self._modules if modules else self._layers)
        ]

    def layers(self, name: str) -> dict[str, list[str]]:
        """The layers called `name`, by the path of the module to which that is relative: the
        block, or experts.
        """
        exact = f"{self._path}.{name}"
        if exact in self._layers:
            return {self._path: self._layers[exact]}
        return {
            path[: -len(name) - 1]: found
            for path, found in self._layers.items()
            if path.endswith(f".{name}")
        }

    def sets(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The layers of several names, those of each expert for themselves."""
        found: dict[str, list[str]] = {}
        for name in names:
            for prefix, layers in self.layers(name).items():
                found.setdefault(prefix, []).extend(layers)
        return found

    def modules(self, name: str, prefix: str) -> list[str]:
        """Paths of the modules called `name` in the expert at `prefix`, else in the block, else
        in any expert.
        """
        if not name:
            return []
        for start in (prefix, self._path):
            if start and f"{start}.{name}" in self._all:
                return [f"{start}.{name}"]
        return [path for path in self._modules if path.endswith(f".{name}")]
