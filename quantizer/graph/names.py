"""The only maker of layer names: `<Model>::<Model>/<Class>[<attr>]/…/<op>`, from the model's
structure alone.
"""

import itertools
import keyword
import re
from collections import Counter

from torch import nn

from quantizer.errors import ModelError

_SAFE = re.compile(r"[A-Za-z_0-9]+")
_TAKEN = ("quantizer", "torch")  # the generated code imports these


def check_names(module: nn.Module) -> None:
    """Refuse module, parameter and class names that are not plain words, before anything
    generates code from them.

    torch itself writes attribute names unescaped into code that it executes, so a hostile name
    must not reach the tracer.

    Raises:
        ModelError: naming the first such name.
    """
    named = itertools.chain(
        module.named_modules(), module.named_parameters(), module.named_buffers()
    )
    for path, _ in named:
        for part in path.split(".") if path else ():
            if not _SAFE.fullmatch(part):
                raise ModelError(
                    f"unsupported module or parameter name {part!r} (in {path!r})",
                    help="rename it: letters, digits and underscores only",
                )
    model = type(module).__name__
    if not model.isidentifier() or keyword.iskeyword(model) or model in _TAKEN:
        raise ModelError(
            f"unsupported class name {model!r} (the model itself)",
            help="the generated code needs a class of that name",
        )
    for path, child in module.named_modules():
        if not _SAFE.fullmatch(type(child).__name__):
            raise ModelError(
                f"unsupported class name {type(child).__name__!r} (module {path!r})"
            )


def around(path: str) -> list[str]:
    """A module's path after those of the modules around it, the model itself excepted.

    >>> around("layers.0.mlp.up")
    ['layers', 'layers.0', 'layers.0.mlp', 'layers.0.mlp.up']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


class Namer:
    """Gives each operation its layer name; remembers only how often a scope has seen an
    operator.
    """

    def __init__(self, module: nn.Module) -> None:
        self.model = type(module).__name__
        paths = dict(module.named_modules(remove_duplicate=False))
        first: dict[int, str] = {id(child): path for path, child in module.named_modules()}
        self._classes = {path: type(child) for path, child in paths.items()}
        self._first = {path: first[id(child)] for path, child in paths.items()}
        self._seen: Counter[str] = Counter()

    def canonical(self, path: str) -> str:
        """The first path of a module that is reachable by several; "" for what is no
        module's.
        """
        return self._first.get(path, "")

    def class_name(self, path: str) -> str:
        """The class of the module at `path`, without its module."""
        return self._classes[path].__name__

    def classes(self, path: str) -> tuple[str, ...]:
        """Qualified class names of the module at `path` and of those around it, innermost
        first.
        """
        found = (self._classes[each] for each in (*reversed(around(path)), ""))
        own = "torch.nn.modules."  # its layers are known by the shorter name
        return tuple(
            f"{'torch.nn' if c.__module__.startswith(own) else c.__module__}.{c.__qualname__}"
            for c in found
        )

    def name(self, path: str, op: str) -> str:
        """The layer name of the next `op` in the scope at `path`; the second of its kind ends
        in `.1`.

        The scope of `layer1.0` is `ResNet/Sequential[layer1]/BasicBlock[0]`, containers that
        are never called included.
        """
        inside = (
            f"{self._classes[each].__name__}[{each.rpartition('.')[2]}]"
            for each in around(path)
        )
        name = f"{self.model}::{'/'.join((self.model, *inside))}/{op}"
        count = self._seen[name]
        self._seen[name] += 1
        return f"{name}.{count}" if count else name

    def input_name(self, index: int) -> str:
        """`ResNet::input_0`."""
        return f"{self.model}::input_{index}"
