"""The files of the package, parsed once for all tests."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "quantizer"
MODULES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Source:
    """A file of the package, and all nodes of its syntax tree."""

    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]


@cache
def source(path: Path) -> Source:
    """Return the file, which is parsed once for all tests."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    return Source(text, tree, tuple(ast.walk(tree)))


def shown(path: Path) -> str:
    """Return a file's path as messages and lists have it."""
    return str(path.relative_to(PACKAGE))
