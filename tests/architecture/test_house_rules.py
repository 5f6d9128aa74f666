"""Only the command line prints, exits or reads the environment; files and functions are short;
modules say what for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

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
FORKS = "storage/child_process.py"
"""Ends the processes that it makes itself."""


def test_only_cli_prints_exits_or_reads_the_environment() -> None:
    faults: list[str] = []
    for path in MODULES:
        if path.is_relative_to(PACKAGE / "cli"):
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
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
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


def test_docstrings_have_one_form() -> None:
    """Summary, prose, then these parts in this order, each at most once, and examples last."""
    faults: list[str] = []
    for path in MODULES:
        for node in source(path).nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = f"{shown(path)}: {getattr(node, 'name', 'module')}"
                text = ast.get_docstring(node) or ""
                faults += [f"{name}: {fault}" for fault in misformed(text)]
    assert not faults


def misformed(docstring: str) -> Iterator[str]:
    """Yield what a docstring has otherwise than the others."""
    parts = ["Args:", "Attributes:", "Returns:", "Raises", "Source:", ">>>"]
    begun: list[str] = []
    for line in docstring.splitlines():
        for part in parts:
            if line.startswith(part) and not (part == ">>>" and part in begun):
                begun.append(part)
    if begun != sorted(set(begun), key=parts.index):
        yield f"parts in the order {begun}"
    if re.search(r"(^|[.;] )[Rr]aises `?[A-Z]\w+", docstring):
        yield "a part of its own for errors"
    if "et al" in docstring and "Source:" not in docstring:
        yield "a part of its own for the source"
    if docstring and not docstring.split("\n\n")[0].rstrip().endswith((".", ":", "…")):
        yield "a sentence first"


def test_no_room_for_leftovers() -> None:
    assert not {path.stem for path in MODULES} & {"utils", "helpers", "misc", "common"}
