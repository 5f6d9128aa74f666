"""The pictures of the documentation have the look of the report, in light and in dark colours."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from quantizer.report.page import charts

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

from svg_file import in_both_schemes, style

PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
PNG_SIZE = slice(16, 24)
"""Width and height in the first chunk of a PNG file."""


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_has_the_style_of_the_report(picture: Path) -> None:
    series = charts.Series("line", [1.0, 2.0])
    drawing = charts.draw_lines([series], ["1", "2"], "dB", title="any", axis_names=("x", "y"))
    expected = style(in_both_schemes(drawing))
    assert "prefers-color-scheme: dark" in expected
    drawn_as = style(picture.read_text("utf-8"))
    assert drawn_as == expected, "run python docs/pictures.py"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_is_on_a_page(picture: Path) -> None:
    link = f"](pictures/{picture.name})"
    pages = [page.name for page in DOCS.glob("*.md") if link in page.read_text("utf-8")]
    assert pages


def test_both_pictures_of_the_report_have_one_size() -> None:
    sizes = []
    for name in ("report.png", "report_dark.png"):
        header = (DOCS / name).read_bytes()[PNG_SIZE]
        sizes.append(struct.unpack(">II", header))
    assert sizes[0] == sizes[1], "run python docs/pictures.py report"
