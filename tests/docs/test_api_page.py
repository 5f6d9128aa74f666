"""The code on docs/api.md runs and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED = "".join(re.findall(r"prints\n\n```\n(.*?)```", PAGE, re.DOTALL))


def test_the_page_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(BLOCKS), {})
    assert capsys.readouterr().out == f"{PRINTED}True\n"
