"""The package is written one step a line, in names and sentences that need no second reading."""

from __future__ import annotations

import ast
from pathlib import Path

from support import ledger

PACKAGE = Path(__file__).parents[2] / "quantizer"
MODULES = sorted(PACKAGE.rglob("*.py"))
TABLES = {"graph/ops.py", "graph/axis_rules.py", "numerics/formats.py"}
"""Files that are tables of rows."""
UNFOLDED = tuple(
    line
    for path in sorted(Path(__file__).parent.glob("unfolded/*.txt"))
    for line in path.read_text("utf-8").split()
)
"""The beginnings of paths of files that hold to the ledger so far."""
MAX_DENSITY = 8.5
VERBS = {
    verb
    for path in (PACKAGE.parent / "tests/support/verbs").glob("*.txt")
    for verb in path.read_text("utf-8").split()
}
"""What a function's docstring may begin with."""
MAX_VAGUE = 20
"""Functions of one line, in all, that may have a variable of such a name."""


def shown(path: Path) -> str:
    """Return a file's path as messages and lists have it."""
    return str(path.relative_to(PACKAGE))


DONE = [path for path in MODULES if shown(path).startswith(UNFOLDED)]


def test_code_is_written_one_step_a_line() -> None:
    faults: list[str] = []
    for path in DONE:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        for fault in (*ledger.folded(tree), *ledger.many_parameters(tree)):
            faults.append(f"{shown(path)}: {fault}")
        density = ledger.density(text)
        if density > MAX_DENSITY and shown(path) not in TABLES:
            faults.append(f"{shown(path)}: {density:.1f} tokens per line of code")
    assert not faults


def test_variables_say_what_they_hold() -> None:
    faults: list[str] = []
    for path in DONE:
        tree = ast.parse(path.read_text("utf-8"))
        faults += [f"{shown(path)}: {fault}" for fault in ledger.vague_names(tree)]
    assert len(faults) <= MAX_VAGUE, faults


def test_docstrings_begin_with_a_verb() -> None:
    faults: list[str] = []
    for path in DONE:
        tree = ast.parse(path.read_text("utf-8"))
        faults += [f"{shown(path)}: {fault}" for fault in ledger.without_verb(tree, VERBS)]
    assert not faults
