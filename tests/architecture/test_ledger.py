"""The package is written one step a line, in names and sentences that need no second reading."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
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
unfolded = pytest.mark.parametrize(
    "path",
    [path for path in MODULES if str(path.relative_to(PACKAGE)).startswith(UNFOLDED)],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)


@unfolded
def test_code_is_written_one_step_a_line(path: Path) -> None:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    faults = [*ledger.folded(tree), *ledger.many_parameters(tree)]
    density = ledger.density(text)
    if density > MAX_DENSITY and str(path.relative_to(PACKAGE)) not in TABLES:
        faults.append(f"{density:.1f} tokens per line of code")
    assert not faults


@unfolded
def test_variables_say_what_they_hold(path: Path) -> None:
    assert not [*ledger.vague_names(ast.parse(path.read_text("utf-8")))]


@unfolded
def test_docstrings_begin_with_a_verb(path: Path) -> None:
    assert not [*ledger.without_verb(ast.parse(path.read_text("utf-8")), VERBS)]
