"""Every file in tests/cases/configs gives exactly the findings in its `.expected` file; a new
case needs no code.

`python -m tests.config.test_cases` writes the expected texts anew; read the difference before
committing it.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from quantizer.cli.render import render_text
from quantizer.config.load import LoadResult, load_config
from quantizer.config.rules.spec_rules import spec_rules

CASES = Path(__file__).parents[1] / "cases" / "configs"
FILES = sorted(CASES.glob("*/*.json"))
PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def told(path: Path) -> tuple[str, LoadResult]:
    result = load_config(path)
    text = render_text(result.diagnostics, result.sources)
    return click.unstyle(text).replace(f"{path.parent}/", ""), result


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path: Path) -> None:
    text, result = told(path)
    assert text == path.with_suffix(".expected").read_text("utf-8").rstrip("\n")
    assert (result.config is not None) == (path.parent.name == "valid")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_is_valid_without_a_warning(path: Path) -> None:
    assert load_config(path).diagnostics == ()


def test_every_rule_has_a_case() -> None:
    told_codes = {
        word.rstrip(":")
        for path in CASES.glob("*/*.expected")
        for word in path.read_text("utf-8").split()
    }
    assert set(spec_rules()) <= told_codes


if __name__ == "__main__":
    for file in FILES:
        file.with_suffix(".expected").write_text(told(file)[0] + "\n", encoding="utf-8")
