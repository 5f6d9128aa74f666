"""Every test has a case that `make test` runs: `extended` marks further cases, never a whole
test.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
HELPER = TESTS / "support" / "extended.py"


def is_extended(node: ast.expr) -> bool:
    """Whether a value of a list is `*extended(...)`, or `extended(...)` itself."""
    value = node.value if isinstance(node, ast.Starred) else node
    if not isinstance(value, ast.Call):
        return False
    return isinstance(value.func, ast.Name) and value.func.id == "extended"


def only_in_lists_with_usual_cases(tree: ast.Module) -> bool:
    """Whether each call of `extended` is in a list that has other values, too."""
    calls = 0
    in_lists = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_extended(node):
            calls += 1
        if isinstance(node, ast.List):
            marked = [value for value in node.elts if is_extended(value)]
            if len(marked) < len(node.elts):
                in_lists += len(marked)
    return calls == in_lists


def test_each_test_with_extended_cases_has_usual_ones() -> None:
    faults: list[str] = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text("utf-8")
        if "extended" not in text or path in (HELPER, Path(__file__)):
            continue
        if "mark.extended" in text or not only_in_lists_with_usual_cases(ast.parse(text)):
            faults.append(str(path.relative_to(TESTS)))
    assert not faults, "write [usual, *extended(further)] or extended_except(values, usual)"
