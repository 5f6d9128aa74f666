"""The pages of promises and of faults: each row names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = {"promises": 15, "faults": 30, "faults_of_runs": 22}
"""How many rows a page has at least."""
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises(page: str) -> list[str]:
    """The rows of a page's tables below their titles."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    return re.findall(r"^\| (?!promise|fault ).*\|$", text, re.MULTILINE)


NAMES = sorted(
    {
        name
        for page in TABLES
        for name in NAMED.findall((ROOT / "docs" / f"{page}.md").read_text("utf-8"))
    }
)


@pytest.mark.parametrize(("file", "test"), NAMES)
def test_a_promise_has_its_test(file: str, test: str) -> None:
    assert f"\ndef {test}(" in (ROOT / file).read_text("utf-8")


@pytest.mark.parametrize("page", TABLES)
def test_no_promise_is_without_one(page: str) -> None:
    rows = promises(page)
    assert len(rows) >= TABLES[page]
    for row in rows:
        *said, tests = (cell.strip() for cell in row.strip("|").split(" | "))
        assert all(said), row
        assert re.fullmatch(rf"{NAMED.pattern}(, {NAMED.pattern})*", tests), row


def test_there_is_a_row_for_each_fault() -> None:
    rows = [*promises("faults"), *promises("faults_of_runs")]
    faults = [row.split(" | ")[0] for row in rows]
    assert len(faults) == len(set(faults)) == 71
