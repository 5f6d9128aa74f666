"""Imports a module without its package, which may ask for more than the module needs."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def module_alone(name: str, folder: Path) -> Any:
    """A module of a package whose own `__init__` is not run; `folder` is where the package
    lies.
    """
    top = name.partition(".")[0]
    for parent in [
        ".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)
    ]:
        module: Any = sys.modules.setdefault(parent, type(sys)(parent))
        module.__path__ = [str(folder.joinpath(*parent.split(".")[1:]))]
    spec = ModuleSpec(top, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[top].__spec__ = spec
    return importlib.import_module(name)
