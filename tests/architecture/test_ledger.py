"""The package is written one step a line, in names and sentences that need no second reading."""

from __future__ import annotations

import ast
from pathlib import Path

from support import ledger

PACKAGE = Path(__file__).parents[2] / "quantizer"
MODULES = sorted(PACKAGE.rglob("*.py"))
TABLES = {"graph/ops.py", "graph/axis_rules.py", "numerics/formats.py"}
"""Files that are tables of rows."""
MAX_DENSITY = 8.5
MAX_MEAN_DENSITY = 8.0
VERBS = set((PACKAGE.parent / "tests/support/verbs.txt").read_text("utf-8").split())
"""What a function's docstring may begin with."""
MAX_REPEATED = 0.02
"""The share of top-level names that may stand in two files."""
MAX_VAGUE = 20
"""Functions of one line, in all, that may have a variable of such a name."""


def shown(path: Path) -> str:
    """Return a file's path as messages and lists have it."""
    return str(path.relative_to(PACKAGE))


def test_code_is_written_one_step_a_line() -> None:
    faults: list[str] = []
    for path in MODULES:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        for fault in (*ledger.folded(tree), *ledger.many_parameters(tree)):
            faults.append(f"{shown(path)}: {fault}")
        density = ledger.density(text)
        if density > MAX_DENSITY and shown(path) not in TABLES:
            faults.append(f"{shown(path)}: {density:.1f} tokens per line of code")
    assert not faults


def test_lines_are_short_in_the_mean() -> None:
    counts = [ledger.tokens_and_lines(path.read_text("utf-8")) for path in MODULES]
    tokens = sum(count for count, _ in counts)
    lines = sum(count for _, count in counts)
    assert tokens / lines <= MAX_MEAN_DENSITY


def test_few_names_stand_in_two_files() -> None:
    files: dict[str, int] = {}
    for path in MODULES:
        for name in ledger.top_level_names(path):
            files[name] = files.get(name, 0) + 1
    repeated = [name for name, count in files.items() if count > 1]
    assert len(repeated) <= MAX_REPEATED * len(files), repeated


def test_variables_say_what_they_hold() -> None:
    faults: list[str] = []
    for path in MODULES:
        tree = ast.parse(path.read_text("utf-8"))
        faults += [f"{shown(path)}: {fault}" for fault in ledger.vague_names(tree)]
    assert len(faults) <= MAX_VAGUE, faults


def test_docstrings_begin_with_a_verb() -> None:
    faults: list[str] = []
    for path in MODULES:
        tree = ast.parse(path.read_text("utf-8"))
        faults += [f"{shown(path)}: {fault}" for fault in ledger.without_verb(tree, VERBS)]
    assert not faults
