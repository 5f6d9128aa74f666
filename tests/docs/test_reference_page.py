"""reference.md of the site has a section for each public name, and a meaning for each argument."""

from __future__ import annotations

import re

import pytest
from support.site import SITE_PAGES

import quantizer

PAGE = SITE_PAGES["reference.md"]
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^###+ ", PAGE, flags=re.MULTILINE)[1:]
}
CALLS = [title for title, part in SECTIONS.items() if "```text\n" in part]


def test_every_public_name_has_a_section() -> None:
    assert set(quantizer.__all__) <= set(SECTIONS)


@pytest.mark.parametrize("title", CALLS)
def test_every_argument_of_a_call_has_a_type_and_a_meaning(title: str) -> None:
    (call,) = re.findall(r"```text\n(.*?)```", SECTIONS[title], re.DOTALL)
    arguments = re.findall(r"[(,]\s*\**(\w+)", call.partition("(")[1] + call.partition("(")[2])
    rows = re.findall(
        r"^\| `(\w+)` \| (`.+?`) \| .*? \| (.+) \|$", SECTIONS[title], re.MULTILINE
    )
    assert sorted(arguments) == sorted(name for name, _, _ in rows)


@pytest.mark.parametrize(
    "title", ["calibrate", "load", "Quantized", "Config", "ModelQuantizer"]
)
def test_what_users_begin_with_has_an_example(title: str) -> None:
    found = [part for name, part in SECTIONS.items() if name.partition(".")[0] == title]
    assert any("```pycon\n>>> " in part for part in found)
