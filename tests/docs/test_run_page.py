"""docs/run.md and docs/run_output.md have a section with a command for every option of a run, and
none that is not one.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from quantizer.cli.main import cli

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / page).read_text("utf-8") for page in ("run.md", "run_output.md"))
SECTIONS = [part.split("\n\n") for part in re.split("\n##+ ", TEXT) if part.startswith("`--")]
OPTIONS = [
    parameter
    for parameter in cli.params
    if isinstance(parameter, click.Option) and not parameter.hidden
]


def test_every_option_has_a_section() -> None:
    named = re.findall(r"`(--\w+)`", " ".join(section[0] for section in SECTIONS))
    assert sorted({*named} - {"--help"}) == sorted(option.opts[0] for option in OPTIONS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section[0])
def test_a_section_has_a_command_of_known_options_and_what_it_prints(
    section: list[str],
) -> None:
    known = {spelling for option in OPTIONS for spelling in option.opts}
    title, command, printed, *_ = section
    assert set(re.findall(r"--\w+", command)) <= known
    assert set(re.findall(r"--\w+", title)) & set(re.findall(r"--\w+", command))
    assert command.startswith("    quantizer --")
    assert printed.startswith(("Prints", "Gives", "Started"))
