"""Only the command line prints, exits or reads the environment; files and functions are short;
modules say what for.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "quantizer"
MODULES = sorted(PACKAGE.rglob("*.py"))
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

named = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)


@named
def test_only_cli_prints_exits_or_reads_the_environment(path: Path) -> None:
    if path.is_relative_to(PACKAGE / "cli"):
        return
    tree = ast.parse(path.read_text("utf-8"))
    caught = {
        id(n)
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler) and handler.type
        for n in ast.walk(handler.type)
    }
    used = {
        ast.unparse(n)
        for n in ast.walk(tree)
        if isinstance(n, (ast.Name, ast.Attribute)) and id(n) not in caught
    }
    assert not used & RESERVED_FOR_CLI


@named
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_FILE
    functions = [
        n
        for n in ast.walk(ast.parse(text))
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    long = {
        f.name: (f.end_lineno or 0) - f.lineno + 1
        for f in functions
        if (f.end_lineno or 0) - f.lineno >= MAX_FUNCTION
    }
    assert not long


@named
def test_modules_say_what_they_are_for(path: Path) -> None:
    text = path.read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    if path.name == "__init__.py" and not text.strip():
        return
    assert docstring
    assert len(docstring.split("\n\n")[0].splitlines()) <= 4


@named
def test_docstrings_have_one_form(path: Path) -> None:
    """Summary, prose, then these parts in this order, each at most once, and examples last."""
    parts = ["Args:", "Attributes:", "Returns:", "Raises", "Source:", ">>>"]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        text = ast.get_docstring(node) or ""
        name = getattr(node, "name", path.name)
        begun = [part for line in text.splitlines() for part in parts if line.startswith(part)]
        begun = [
            part
            for index, part in enumerate(begun)
            if part != ">>>" or part not in begun[:index]
        ]
        assert begun == sorted(set(begun), key=parts.index), name
        assert not re.search(r"(^|[.;] )[Rr]aises `?[A-Z]\w+", text), (
            f"{name}: a part of its own for errors"
        )
        assert "et al" not in text or "Source:" in text, (
            f"{name}: a part of its own for the source"
        )
        assert not text or text.split("\n\n")[0].rstrip().endswith((".", ":", "…")), (
            f"{name}: a sentence first"
        )


def test_no_room_for_leftovers() -> None:
    assert not {path.stem for path in MODULES} & {"utils", "helpers", "misc", "common"}
