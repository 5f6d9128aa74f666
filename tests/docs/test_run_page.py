"""docs/run.md has a row with a command for every option of a run, and none that is not one."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from quantizer.cli.main import cli

PAGE = (Path(__file__).parents[2] / "docs" / "run.md").read_text("utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `--")]
OPTIONS = [parameter for parameter in cli.params if isinstance(parameter, click.Option)]


def test_every_option_has_a_row() -> None:
    named = re.findall(r"`(--\w+)`", " ".join(row[0] for row in ROWS))
    assert sorted({*named} - {"--help"}) == sorted(option.opts[0] for option in OPTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_a_command_of_known_options_and_what_it_prints(row: list[str]) -> None:
    known = {spelling for option in OPTIONS for spelling in option.opts}
    assert set(re.findall(r"--\w+", row[1])) <= known
    assert "`" in row[1]
    assert len(row) == 3
    assert row[2]
