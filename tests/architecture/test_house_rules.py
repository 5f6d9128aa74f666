"""Only the command line prints, exits or reads the environment; files and functions are short;
modules and public functions say what for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from support.ledger import MODULES, PACKAGE, shown, source

MAX_FILE, MAX_FUNCTION = 450, 70
RESERVED_FOR_CLI = {
    "print",
    "exit",
    "quit",
    "sys.exit",
    "os._exit",
    "os.getenv",
    "os.environ",
    "sys.argv",
    "SystemExit",
}
MAX_UNDOCUMENTED = 5
"""The lines of a method that a base class documents, and that needs no docstring itself."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FORKS = "storage/child_process.py"
"""Ends the processes that it makes itself."""


def test_only_cli_prints_exits_or_reads_the_environment() -> None:
    faults: list[str] = []
    for path in MODULES:
        if path.is_relative_to(PACKAGE / "cli") or path == PACKAGE / "__main__.py":
            continue
        nodes = source(path).nodes
        caught: set[int] = set()
        for node in nodes:
            if isinstance(node, ast.ExceptHandler) and node.type:
                caught |= {id(inner) for inner in ast.walk(node.type)}
        for node in nodes:
            if shown(path) == FORKS and dotted(node) == "os._exit":
                continue
            if dotted(node) in RESERVED_FOR_CLI and id(node) not in caught:
                faults.append(f"{shown(path)}: {dotted(node)}")
    assert not faults


def dotted(node: ast.AST) -> str:
    """Return `sys.exit` for these two names, `exit` for one, "" for everything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def test_files_and_functions_are_short() -> None:
    faults: list[str] = []
    for path in MODULES:
        file = source(path)
        if len(file.text.splitlines()) > MAX_FILE:
            faults.append(shown(path))
        for node in file.nodes:
            is_function = isinstance(node, _FUNCTIONS)
            if is_function and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION:
                faults.append(f"{shown(path)}: {node.name}")
    assert not faults


def test_modules_say_what_they_are_for() -> None:
    faults: list[str] = []
    for path in MODULES:
        file = source(path)
        docstring = ast.get_docstring(file.tree) or ""
        is_empty = path.name == "__init__.py" and not file.text.strip()
        first = docstring.split("\n\n")[0].splitlines()
        if not is_empty and not 1 <= len(first) <= 4:
            faults.append(shown(path))
    assert not faults


def test_public_functions_say_what_they_do() -> None:
    documented = documented_methods()
    faults: list[str] = []
    for path in MODULES:
        missing = without_docstring(source(path).nodes, documented)
        faults += [f"{shown(path)}: {fault}" for fault in missing]
    assert not faults


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
