"""The code on docs/api.md and docs/in_place.md runs and prints what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.runs import ROOT


@pytest.mark.parametrize(("page", "ending"), [("api.md", ""), ("in_place.md", "True\n")])
def test_a_page_prints_what_it_says(
    page: str,
    ending: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    shown = "".join(re.findall(r"prints\n\n```\n(.*?)```", text, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {})
    assert capsys.readouterr().out == shown + ending
