"""docs/threats.md: each promise names a test that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = re.findall(r"\| `(tests/[\w/]+\.py)::(\w+)` \|", (ROOT / "docs" / "threats.md").read_text("utf-8"))


@pytest.mark.parametrize(("file", "test"), PROMISES)
def test_a_promise_has_its_test(file: str, test: str) -> None:
    assert f"\ndef {test}(" in (ROOT / file).read_text("utf-8")


def test_no_promise_is_without_one() -> None:
    text = (ROOT / "docs" / "threats.md").read_text("utf-8").partition("## Promises")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) == len(PROMISES) > 10
