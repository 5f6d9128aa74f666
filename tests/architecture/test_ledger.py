"""The package is written one step a line, in names and sentences that need no second reading."""

from __future__ import annotations

from support import ledger
from support.ledger import MODULES, PACKAGE, shown, source

VERBS = set((PACKAGE.parent / "tests/support/verbs.txt").read_text("utf-8").split())
"""What a function's docstring may begin with."""
MAX_REPEATED = 0.02
"""The share of top-level names that may stand in two files."""
MAX_VAGUE = 20
"""Functions of one line, in all, that may have a variable of such a name."""


def test_code_is_written_one_step_a_line() -> None:
    faults: list[str] = []
    for path in MODULES:
        nodes = source(path).nodes
        for fault in (*ledger.folded(nodes), *ledger.many_parameters(nodes)):
            faults.append(f"{shown(path)}: {fault}")
    assert not faults


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
        nodes = source(path).nodes
        faults += [f"{shown(path)}: {fault}" for fault in ledger.vague_names(nodes)]
    assert len(faults) <= MAX_VAGUE, faults


def test_public_functions_say_what_they_do() -> None:
    documented = ledger.documented_methods()
    faults: list[str] = []
    for path in MODULES:
        nodes = source(path).nodes
        missing = ledger.without_docstring(nodes, documented)
        faults += [f"{shown(path)}: {fault}" for fault in missing]
    assert not faults


def test_docstrings_begin_with_a_verb() -> None:
    faults: list[str] = []
    for path in MODULES:
        nodes = source(path).nodes
        faults += [f"{shown(path)}: {fault}" for fault in ledger.without_verb(nodes, VERBS)]
    assert not faults
