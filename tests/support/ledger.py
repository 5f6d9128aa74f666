"""Measure how densely a file is written, and how its names and docstrings read."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

VAGUE = {"found", "said", "made", "own", "each", "held", "given", "at", "rest", "kept"}
"""Names that do not say what a variable holds."""
MAX_POSITIONAL = 4
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def tokens_and_lines(text: str) -> tuple[int, int]:
    """Return the tokens of a file and its lines of code, without comments and docstrings."""
    docstrings: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(text)):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            docstrings.add((node.lineno, node.col_offset))
    count = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT or token.start in docstrings:
            continue
        count += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return count, len(lines)


def density(text: str) -> float:
    """Return the tokens per line of code."""
    count, lines = tokens_and_lines(text)
    return count / max(lines, 1)


def folded(tree: ast.AST) -> Iterator[str]:
    """Yield what is written in one expression and should be several steps."""
    for node in ast.walk(tree):
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


def many_parameters(tree: ast.AST) -> Iterator[str]:
    """Yield the functions with more than four positional parameters, besides self and cls."""
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS):
            continue
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        is_imposed = node.name.startswith("__torch_")  # by torch, which calls them
        if len(names) > MAX_POSITIONAL and not is_imposed:
            yield f"line {node.lineno}: {node.name} has {len(names)} positional parameters"


def vague_names(tree: ast.AST) -> Iterator[str]:
    """Yield the functions with a variable or parameter whose name says nothing."""
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS):
            continue
        names = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
        vague = sorted(names & VAGUE)
        if vague:
            yield f"line {node.lineno}: {node.name} has {', '.join(vague)}"


def without_verb(tree: ast.AST, verbs: set[str]) -> Iterator[str]:
    """Yield the functions whose docstring does not begin with one of `verbs`."""
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS):
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and words[0].rstrip(",:.") not in verbs:
            yield f"line {node.lineno}: {node.name}: {' '.join(words[:6])}"


def top_level_names(path: Path) -> set[str]:
    """Return the names of a file's public functions, classes and constants."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}
