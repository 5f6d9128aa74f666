"""report.html in headless Chromium: what its script adds, on a screen without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.runs import calibrate, check

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine"),
]
OPTIONS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--dump-dom"),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the digits example, calibrated and tested."""
    folder = tmp_path_factory.mktemp("browser") / "out"
    assert calibrate(folder) == 0
    assert check(folder) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def shown(page: str, folder: Path, script: str = "") -> str:
    """The page after its own script and this one, as Chromium has it then."""
    file = folder / "page.html"
    file.write_text(
        page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
    )
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    ).stdout


class Rows(HTMLParser):
    """The rows of the first table: their cells' texts, and whether the row is hidden."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.rows: list[tuple[bool, list[str]]] = []
        self._in_body = self._in_cell = self._done = False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_body |= tag == "tbody"
        if self._in_body and not self._done and tag == "tr":
            self.rows.append(("hidden" in dict(attrs), []))
        if self._in_body and not self._done and tag == "td":
            self._in_cell = True
            self.rows[-1][1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag != "td"
        self._done |= tag == "tbody" and self._in_body

    def handle_data(self, data: str) -> None:
        if self._in_cell and not self._done:
            self.rows[-1][1][-1] += data


def test_a_click_on_a_title_sorts_and_empty_cells_stay_last(page: str, tmp_path: Path) -> None:
    click = "const b = document.querySelectorAll('#layers th button')[{0}]; {1}"
    for clicks in (1, 2):
        found = Rows(shown(page, tmp_path, click.format(4, "b.click();" * clicks)))
        values = [cells[4] for _, cells in found.rows]
        numbers = [float(value) for value in values if value]
        assert len(numbers) > 5
        assert values[len(numbers) :] == [""] * (len(values) - len(numbers))
        assert numbers == sorted(numbers, reverse=clicks == 2)


def test_the_filter_hides_other_layers(page: str, tmp_path: Path) -> None:
    typed = (
        "const i = document.querySelector('#layers input'); i.value = 'FC'; "
        "i.dispatchEvent(new Event('input'));"
    )
    rows = Rows(shown(page, tmp_path, typed)).rows
    assert {cells[0] for hidden, cells in rows if not hidden} == {"fc"}
    assert any(hidden for hidden, _ in rows)


def test_every_section_is_there_and_drawn(page: str, tmp_path: Path) -> None:
    boxes = """
    const sections = [...document.querySelectorAll('section')].map(s => s.id + ':' + (s.offsetHeight > 40));
    for (const d of document.querySelectorAll('details')) d.open = true;
    const drawn = [...document.querySelectorAll('svg')].map(s => s.getBBox().width > 100 && s.getBBox().height > 20);
    const asked = performance.getEntriesByType('resource').length;
    document.title = [sections.join(' '), drawn.length, drawn.every(d => d), asked].join('|');
    """
    title = re.search(r"<title>(.*?)</title>", shown(page, tmp_path, boxes), re.DOTALL)
    assert title is not None
    sections, drawings, all_drawn, asked = title[1].split("|")
    names = (
        "layers",
        "depth",
        "activations",
        "weights",
        "data",
        "coverage",
        "config",
        "reproduce",
    )
    assert sections.split() == [f"{name}:true" for name in names]
    assert int(drawings) > 20
    assert all_drawn == "true"
    assert asked == "0"
