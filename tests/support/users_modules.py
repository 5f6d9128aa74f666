"""The digest of a model's code looks through all loaded modules. A process of tests has loaded
thousands, and nearly all are of installed packages: those are asked for their files once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from quantizer.results import model_code


def look_at_modules_of_users(
    patched: pytest.MonkeyPatch, is_file_of_user: Callable[[str], bool]
) -> None:
    """Show to the digest what is of users, and the modules that have classes of the model."""
    digests = model_code._file_digests
    of_others: dict[str, ModuleType] = {}
    seen = SimpleNamespace(modules=sys.modules)

    def file_digests(module: nn.Module) -> list[str]:
        shown = {type(part).__module__ for part in module.modules()} & sys.modules.keys()
        for name, loaded in list(sys.modules.items()):
            if of_others.get(name) is loaded:
                continue
            file = getattr(loaded, "__dict__", {}).get("__file__")
            if file is not None and is_file_of_user(file):
                shown.add(name)
            else:
                of_others[name] = loaded
        seen.modules = {name: sys.modules[name] for name in shown | {"__main__"}}
        try:
            return digests(module)
        finally:
            seen.modules = sys.modules

    patched.setattr(model_code, "sys", seen)
    patched.setattr(model_code, "_file_digests", file_digests)
