"""report.html in headless Chromium: what its script adds, on a screen without a network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import reports
from support.browser import AXE, CHROMIUM, checked, shown
from support.runs import calibrate, check

from quantizer.report.page.page import SECTIONS
from quantizer.report.page.page import page as page_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the digits example, calibrated and tested."""
    folder = tmp_path_factory.mktemp("browser") / "out"
    assert calibrate(folder) == 0
    assert check(folder) == 0
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """A page with every section."""
    tested = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return page_of(reports.whole(tested))


class Rows(HTMLParser):
    """The rows of the first table of a section: their cells' texts, and whether the row is
    hidden.
    """

    def __init__(self, content: str, section: str) -> None:
        super().__init__()
        content = content.partition(f'<section id="{section}">')[2]
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
        found = Rows(shown(page, tmp_path, click.format(3, "b.click();" * clicks)), "layers")
        values = [cells[3] for _, cells in found.rows]
        numbers = [float(value) for value in values if value]
        assert len(numbers) > 5
        assert values[len(numbers) :] == [""] * (len(values) - len(numbers))
        assert numbers == sorted(numbers, reverse=clicks == 2)


def test_the_filter_hides_other_layers(page: str, tmp_path: Path) -> None:
    typed = (
        "const i = document.querySelector('#layers input'); i.value = 'FC'; "
        "i.dispatchEvent(new Event('input'));"
    )
    rows = Rows(shown(page, tmp_path, typed), "layers").rows
    assert {cells[0] for hidden, cells in rows if not hidden} == {"fc"}
    assert any(hidden for hidden, _ in rows)


def test_every_section_is_there_and_drawn(whole: str, tmp_path: Path) -> None:
    boxes = """
    const sections = [...document.querySelectorAll('section')].map(s => s.id + ':' + (s.offsetHeight > 40));
    for (const d of document.querySelectorAll('details')) d.open = true;
    const drawn = [...document.querySelectorAll('svg')].map(s => s.getBBox().width > 100 && s.getBBox().height > 20);
    const asked = performance.getEntriesByType('resource').length;
    document.title = [sections.join(' '), drawn.length, drawn.every(d => d), asked].join('|');
    """
    title = re.search(r"<title>(.*?)</title>", shown(whole, tmp_path, boxes), re.DOTALL)
    assert title is not None
    sections, drawings, all_drawn, asked = title[1].split("|")
    assert sections.split() == [f"{name}:true" for name in SECTIONS]
    assert int(drawings) > 20
    assert all_drawn == "true"
    assert asked == "0"


def test_the_pointer_reads_the_values_of_a_drawing(page: str, tmp_path: Path) -> None:
    point = """
    const svg = document.querySelector('#depth svg'), box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + box.width / 2 }));
    document.title = svg.nextElementSibling.textContent;
    """
    title = re.search(r"<title>(.*?)</title>", shown(page, tmp_path, point), re.DOTALL)
    assert title is not None
    number = r"\d+(\.\d+)?"
    assert re.fullmatch(
        rf"activation of \S+: local {number} dB, accumulated {number} dB", title[1]
    )


def test_each_command_has_a_button_to_copy_it(page: str, tmp_path: Path) -> None:
    count = """
    const commands = [...document.querySelectorAll('.command')];
    document.title = commands.map(c => c.querySelector('button').textContent).join(' ');
    """
    title = re.search(r"<title>(.*?)</title>", shown(page, tmp_path, count), re.DOTALL)
    assert title is not None
    assert title[1] == "Copy Copy Copy Copy", "calib and test, as the next step and at the end"


@pytest.mark.skipif(not AXE.exists(), reason="run `npm install --no-save axe-core` first")
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_no_violation(width: int, is_dark: bool, whole: str, tmp_path: Path) -> None:
    found = checked(whole, tmp_path, width=width, is_dark=is_dark)
    assert found["violations"] == []
    assert (found["width"], found["dark"]) == (width, is_dark)
    assert found["scrolled"] == width, "the page itself does not scroll sideways"
    assert found["smallest"] > 11, "texts of drawings have pixels enough to be read"
