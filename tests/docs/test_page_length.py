"""No page of docs/ has more than 1,500 words that are written by hand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from support.runs import ROOT
from support.site import SITE_PAGES

DOCS = ROOT / "docs"
PARTS = runpy.run_path(str(DOCS / "generate.py"))["PARTS"]
without_parts = runpy.run_path(str(DOCS / "marked_parts.py"))["without_parts"]
MOST_WORDS = 1500
PAGES = [
    path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).as_posix() not in SITE_PAGES
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_without_what_is_generated(page: Path) -> None:
    words = without_parts(page.read_text("utf-8"), PARTS).split()
    assert len(words) <= MOST_WORDS, "say it shorter, or split the page by what readers want"


def test_what_is_marked_as_generated_is_generated() -> None:
    marked = [
        (name, page.relative_to(DOCS).as_posix())
        for page in PAGES
        for name in re.findall(r"<!-- (\w+): written by", page.read_text("utf-8"))
    ]
    assert sorted(marked) == sorted((name, place) for name, (place, _) in PARTS.items())
