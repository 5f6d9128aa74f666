"""Each target has a page with the same five headings, of at most 900 words."""

from __future__ import annotations

import re

import pytest
from support.runs import ROOT

from quantizer.export.targets import EXPORTERS

DOCS = ROOT / "docs"
HEADINGS = [
    "In one command",
    "What the file holds",
    "What is checked",
    "Speed and accuracy",
    "Limits",
]
MOST_WORDS = 900
OVERVIEW = (DOCS / "deploy.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\[`[\w-]+`\]\(.*?) \|", OVERVIEW, re.MULTILINE)
"""The first cells of the table of targets: a link for each target, perhaps one for engines."""
PAGES = sorted({page for row in ROWS for page in re.findall(r"\((\w+\.md)", row)})


def test_each_target_has_a_page() -> None:
    named = re.findall(r"^\[`([\w-]+)`", "\n".join(ROWS), re.MULTILINE)
    assert sorted(named) == sorted(EXPORTERS)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_a_target_is_short_and_has_the_five_headings(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert len(text.split()) <= MOST_WORDS
