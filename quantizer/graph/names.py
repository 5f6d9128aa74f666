"""Names of layers and modules: `<Model>::<Model>/<Class>[<attr>]/…/<op>`, from the model's
structure alone, and dotted paths as users know them. No other file makes such names.
"""

import itertools
import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import nn

from quantizer.errors import ModelError
from quantizer.graph.ir import Graph, Node

_SAFE = re.compile(r"[A-Za-z_0-9]+")
_USED = ("quantizer", "torch", "super", "float", "complex")
"""The names that the generated code uses. It also uses names such as `__file__`."""
_LONGEST = 150
"""The longest name of a class that is part of the names of files."""


def is_operator_name(text: str) -> bool:
    """Return whether a text names an operator of a graph, and not a tensor of the model.

    >>> is_operator_name("Net::Net/Linear[fc]/linear"), is_operator_name("fc.weight")
    (True, False)
    """
    return "::" in text


def check_names(module: nn.Module) -> None:
    """Refuse module, parameter and class names that are not plain words.

    This runs before anything generates code from names. torch itself writes attribute names
    unescaped into code that it executes, so a hostile name must not reach the tracer.

    Raises:
        ModelError: naming the first such name.
    """
    named = itertools.chain(
        module.named_modules(), module.named_parameters(), module.named_buffers()
    )
    for path, _ in named:
        words = path.split(".") if path else []
        for word in words:
            if not _SAFE.fullmatch(word):
                raise ModelError(
                    f"unsupported module or parameter name {word!r} (in {path!r})",
                    help="rename it: letters, digits and underscores only",
                )
    model = type(module).__name__
    is_used = model in _USED
    if model.startswith("__") and model.endswith("__"):
        is_used = True
    is_identifier = model.isidentifier() and not keyword.iskeyword(model)
    is_too_long = len(model) > _LONGEST
    if is_used or is_too_long or not is_identifier:
        raise ModelError(
            f"unsupported class name {model!r:.200} (the model itself)",
            help="the generated code needs a class of that name: rename the class",
        )
    for path, child in module.named_modules():
        name = type(child).__name__
        if not _SAFE.fullmatch(name):
            raise ModelError(f"unsupported class name {name!r} (module {path!r})")


def around(path: str) -> list[str]:
    """Return a module's path after the paths of the modules around it, without the model's.

    >>> around("layers.0.mlp.up")
    ['layers', 'layers.0', 'layers.0.mlp', 'layers.0.mlp.up']
    """
    words = path.split(".") if path else []
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]


class Namer:
    """Gives each operation its layer name, and counts the operators of each scope."""

    def __init__(self, module: nn.Module) -> None:
        self.model = type(module).__name__
        self._classes: dict[str, type[nn.Module]] = {}
        self._canonical: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        first: dict[int, str] = {}
        for path, child in module.named_modules(remove_duplicate=False):
            self._classes[path] = type(child)
            self._canonical[path] = first.setdefault(id(child), path)

    def canonical(self, path: str) -> str:
        """Return the first path of a module that has several, "" if no module is there."""
        return self._canonical.get(path, "")

    def class_name(self, path: str) -> str:
        """Return the name of the class of the module at `path`."""
        return self._classes[path].__name__

    def classes(self, path: str) -> tuple[str, ...]:
        """Return the qualified class names of the module at `path` and of those around it,
        innermost first.
        """
        names: list[str] = []
        for inner in (*reversed(around(path)), ""):
            kind = self._classes[inner]
            package = kind.__module__
            if package.startswith("torch.nn.modules."):
                package = "torch.nn"
            names.append(f"{package}.{kind.__qualname__}")
        return tuple(names)

    def name(self, path: str, op: str) -> str:
        """Return the layer name of the next `op` in the scope at `path`.

        The second of its kind ends in `.1`. The scope of `layer1.0` is
        `ResNet/Sequential[layer1]/BasicBlock[0]`, with containers that are never called.
        """
        scope = self.model
        for inner in around(path):
            attribute = inner.rpartition(".")[2]
            scope += f"/{self.class_name(inner)}[{attribute}]"
        name = f"{self.model}::{scope}/{op}"
        count = self._counts[name]
        self._counts[name] += 1
        return f"{name}.{count}" if count else name

    def input_name(self, index: int) -> str:
        """Return the name of an input, such as `ResNet::input_0`."""
        return f"{self.model}::input_{index}"


def module_of(graph: Graph, name: str) -> str:
    """Return the path of the module that ran a node, or that owns a tensor."""
    node = graph.by_name[name]
    if node.is_tensor:
        return node.params["weight"].rpartition(".")[0]
    return node.scope


def layer_path(node: Node) -> str:
    """Return the path of a layer that multiplies: that of its module.

    A module of experts has several such layers. There the layer's own name is appended.
    """
    return call_paths(node.name, node.scope)[0] if node.row.experts else node.scope


def module_paths(graph: Graph) -> frozenset[str]:
    """Return the paths of all modules that run an operator or own a tensor, and of the modules
    around them.
    """
    owners = {node.scope for node in graph.nodes}
    owners.update(path.rpartition(".")[0] for path in graph.tensors)
    paths = set(owners)
    for owner in owners:
        paths.update(around(owner))
    return frozenset(paths)


def path_names(graph: Graph) -> dict[str, str]:
    """Return the name under which users know each node, by the node's own name.

    - If a module runs one kind of operator, the name is the module's path (`conv1`).
    - If it runs several kinds or contains modules, the operator follows (`layer1.0.add`).
      Operators with weights need that only if there are several weights in it, or in modules
      that it contains.
    - Later calls of a module keep their number (`layer1.0.relu.1`).
    - Nodes for which the same name results keep their own name.
    """
    paths: dict[str, str] = {}
    weights: dict[str, str] = {}
    parents: set[str] = set()
    parents_of_weights: set[str] = set()
    operators = defaultdict[str, set[str]](set)
    weights_of_module = defaultdict[str, set[str]](set)
    for node in graph.nodes:
        path = module_of(graph, node.name)
        paths[node.name] = path
        parents.update(around(path)[:-1])
        operators[path].add(last_part(node.name).partition(".")[0])
        weight = _weight(node)
        if weight is not None:
            weights[node.name] = weight
            weights_of_module[path].add(weight)
            parents_of_weights.update(around(path)[:-1])
    names: dict[str, str] = {}
    for name, path in paths.items():
        with_operator, without_operator = call_paths(name, path)
        rivals = operators[path]
        has_parts = path in parents
        if name in weights:
            rivals = weights_of_module[path]
            has_parts = path in parents_of_weights
        is_unique = len(rivals) == 1 and not has_parts
        names[name] = without_operator if path and is_unique else with_operator
    counts = Counter(names.values())
    for name, path in names.items():
        if counts[path] > 1:
            names[name] = name
    return names


def _weight(node: Node) -> str | None:
    """Return the path of a layer's first weight; None for a node that only outputs a tensor."""
    for key, path in node.params.items():
        if key.startswith("weight") and not node.is_tensor:
            return path
    return None


def call_paths(name: str, path: str) -> tuple[str, str]:
    """Return a layer's name with its operator and without, both after its module's path.

    >>> call_paths("Net::Net/Sequential[layers]/ReLU[0]/relu.1", "layers.0")
    ('layers.0.relu.1', 'layers.0.1')
    """
    operator = last_part(name)
    _, dot, number = operator.partition(".")
    with_operator = f"{path}.{operator}" if path else operator
    return with_operator, f"{path}{dot}{number}"


def last_part(name: str) -> str:
    """Return the last part of a layer's name."""
    return name.rpartition("::")[2].rpartition("/")[2]


class BlockNames:
    """Resolves names relative to the block at `path`.

    A name that is not a path in the block stands for all layers whose path ends with it. So one
    name stands for the same layer of all experts.
    """

    def __init__(self, graph: Graph, path: str) -> None:
        self._path = path
        self._modules: list[str] = []
        self._layers: dict[str, list[str]] = {}
        beginning = f"{path}."
        for module in sorted(module_paths(graph)):
            if module.startswith(beginning):
                self._modules.append(module)
        for node in graph.nodes:
            if node.is_multiplying and f"{node.scope}.".startswith(beginning):
                self._layers.setdefault(layer_path(node), []).append(node.name)

    def known(self, *, modules: bool = False) -> list[str]:
        """Return the relative paths of the layers, or of all modules."""
        paths = self._modules if modules else self._layers
        start = len(self._path) + 1
        return [path[start:] for path in paths]

    def layers(self, name: str) -> dict[str, list[str]]:
        """Return the layers called `name`, by the path of the module that `name` is relative
        to: the block, or an expert.
        """
        exact = f"{self._path}.{name}"
        if exact in self._layers:
            return {self._path: self._layers[exact]}
        ending = f".{name}"
        layers: dict[str, list[str]] = {}
        for path, nodes in self._layers.items():
            if path.endswith(ending):
                layers[path.removesuffix(ending)] = nodes
        return layers

    def sets(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the layers of several names together, by the same paths as `layers`."""
        by_prefix: dict[str, list[str]] = {}
        for name in names:
            for prefix, layers in self.layers(name).items():
                by_prefix.setdefault(prefix, []).extend(layers)
        return by_prefix

    def modules(self, name: str, prefix: str) -> list[str]:
        """Return the paths of the modules called `name`.

        It is the module inside the expert at `prefix`. If there is none, it is the one inside
        the block, and otherwise all whose path ends with `name`.
        """
        if not name:
            return []
        for start in (prefix, self._path):
            path = f"{start}.{name}"
            if start and path in self._modules:
                return [path]
        return [path for path in self._modules if path.endswith(f".{name}")]
