"""`quantizer explain`: every code and every key has a page; a layer is passed on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantizer.cli.main import run_command
from quantizer.cli.options import ModelOptions
from quantizer.config.codes import all_codes
from quantizer.config.pages import key_names

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("code", all_codes())
def test_every_code_has_a_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", code.lower()]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"# {code}\n")
    assert page.removeprefix("# ").strip() in (DOCS / "rules.md").read_text("utf-8")


@pytest.mark.parametrize("key", key_names())
def test_every_key_has_a_page_with_default_and_example(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", key]) == 0
    page = capsys.readouterr().out
    assert page == (DOCS / "config" / f"{key}.md").read_text("utf-8")
    assert f'```json\n"{key}": ' in page
    assert "Default: " in page or key == "overall_quantize_config"


def test_unknown_name_gets_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", "round_mod"]) == 2
    assert 'did you mean "round_mode"?' in capsys.readouterr().err


def test_a_layer_is_passed_on_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ModelOptions]] = []

    def explain_layer(layer: str, options: ModelOptions) -> int:
        seen.append((layer, options))
        return 0

    monkeypatch.setitem(sys.modules, "quantizer.cli.explain_layer", SimpleNamespace(explain_layer=explain_layer))
    assert run_command(["explain", "--config", "c.json", "--model", "m.py", "layer1.0.conv1"]) == 0
    assert seen == [("layer1.0.conv1", ModelOptions(model="m.py", config_file="c.json"))]
