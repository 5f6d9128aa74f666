"""A target of `--deploy` imports only the packages that its row names, and those of the core."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
from support.ledger import PACKAGE

from quantizer.export.targets import EXPORTERS

CORE = {"torch", "safetensors", "jsonschema", "referencing", "click", "rich", "numpy"}
BROUGHT_ALONG = {"onnxscript": {"onnx_ir"}, "onnxruntime": {"numpy"}}
"""What a package installs with it."""


def file_of(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@cache
def imported_at_once(file: Path) -> frozenset[str]:
    """Return what a file imports when it is imported itself: not in functions, not for types."""
    names: set[str] = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def packages_of(module: str) -> dict[str, str]:
    """Return the packages that importing a module imports, each with the module that does."""
    packages: dict[str, str] = {}
    waiting, done = [module], {module}
    while waiting:
        name = waiting.pop()
        file = file_of(name)
        if file is None:
            continue
        for other in imported_at_once(file):
            package = other.partition(".")[0]
            if package != "quantizer":
                packages.setdefault(package, name)
            elif other not in done:
                done.add(other)
                waiting.append(other)
    return packages


@pytest.mark.parametrize("target", EXPORTERS)
def test_a_target_imports_the_packages_of_its_row(target: str) -> None:
    row = EXPORTERS[target]
    allowed = CORE | set(row.needs) | set(sys.stdlib_module_names)
    for package in row.needs:
        allowed |= BROUGHT_ALONG.get(package, set())
    packages = packages_of(row.exporter.partition(":")[0])
    assert "torch" in packages
    assert {package: by for package, by in packages.items() if package not in allowed} == {}
