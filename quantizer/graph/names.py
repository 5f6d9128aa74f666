"""Layer names: `<Model>::<Model>/<Class>[<attr>]/…/<op>`, from the model's structure alone. No
other file makes such names.
"""

import itertools
import keyword
import re
from collections import Counter

from torch import nn

from quantizer.errors import ModelError

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
