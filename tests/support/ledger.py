"""Find what is written in one step instead of several, and how names and docstrings read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "quantizer"
MODULES = sorted(PACKAGE.rglob("*.py"))

VAGUE = {"found", "said", "made", "own", "each", "held", "given", "at", "rest", "kept"}
"""Names that do not say what a variable holds."""
MAX_POSITIONAL = 4
MAX_UNDOCUMENTED = 5
"""The lines of a method that a base class documents, and that needs no docstring itself."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


def folded(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what is written in one expression and should be several steps."""
    for node in nodes:
        if isinstance(node, _COMPREHENSIONS):
            if len(node.generators) > 1:
                yield f"line {node.lineno}: a comprehension with two `for`"
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, _COMPREHENSIONS):
                    yield f"line {inner.lineno}: a comprehension in a comprehension"
        if isinstance(node, (ast.IfExp, ast.Call)):
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, ast.IfExp):
                    yield f"line {inner.lineno}: a conditional expression in another expression"


def many_parameters(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the functions with more than four positional parameters, besides self and cls."""
    for node in nodes:
        if not isinstance(node, _FUNCTIONS):
            continue
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        is_imposed = node.name.startswith("__torch_")  # by torch, which calls them
        if len(names) > MAX_POSITIONAL and not is_imposed:
            yield f"line {node.lineno}: {node.name} has {len(names)} positional parameters"


def vague_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the functions with a variable or parameter whose name says nothing."""
    for node in nodes:
        if not isinstance(node, _FUNCTIONS):
            continue
        names = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
        vague = sorted(names & VAGUE)
        if vague:
            yield f"line {node.lineno}: {node.name} has {', '.join(vague)}"


def without_verb(nodes: Iterable[ast.AST], verbs: set[str]) -> Iterator[str]:
    """Yield the functions whose docstring does not begin with one of `verbs`."""
    for node in nodes:
        if not isinstance(node, _FUNCTIONS):
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and words[0].rstrip(",:.") not in verbs:
            yield f"line {node.lineno}: {node.name}: {' '.join(words[:6])}"


def without_docstring(
    nodes: Iterable[ast.AST], documented: set[tuple[str, str]]
) -> Iterator[str]:
    """Yield the public functions and methods without a docstring.

    A method needs none if it is short and a base class documents it, or if it is declared and
    not defined. Functions inside functions need none either.

    Args:
        nodes: of a file.
        documented: the (class, method) pairs that have a docstring.
    """
    for node in nodes:
        bases: list[str] = []
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
        elif not isinstance(node, ast.Module):
            continue
        for function in node.body:
            if not isinstance(function, _FUNCTIONS) or function.name.startswith("_"):
                continue
            first, last = function.body[0], function.body[-1]
            is_declared = ast.unparse(first) == "..."
            is_short = (last.end_lineno or 0) - first.lineno < MAX_UNDOCUMENTED
            is_override = any((base, function.name) in documented for base in bases)
            if not (ast.get_docstring(function) or is_declared or (is_short and is_override)):
                yield f"line {function.lineno}: {function.name}"


def documented_methods() -> set[tuple[str, str]]:
    """Return the (class, method) pairs of the package that have a docstring."""
    pairs: set[tuple[str, str]] = set()
    for path in MODULES:
        for node in source(path).nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, _FUNCTIONS) and ast.get_docstring(method):
                    pairs.add((node.name, method.name))
    return pairs


def top_level_names(path: Path) -> set[str]:
    """Return the names of a file's public functions, classes and constants."""
    names: set[str] = set()
    for node in source(path).tree.body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}
