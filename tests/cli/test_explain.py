"""`quantizer explain`: every code and every key has a page; a layer is passed on."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantizer.cli.main import run_command
from quantizer.cli.options import ModelOptions
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.codes import all_codes
from quantizer.config.pages import key_names, setting_names

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
    document = (DOCS / "config" / f"{key}.md").read_text("utf-8")
    assert page == re.sub(r"\[(QZ\d+)\]\(\.\./rules\.md#qz\d+\)", r"\1", document)
    assert "](" not in page
    assert (f'"name": "{key}"' if key in ALGORITHMS else f'```json\n"{key}": ') in page
    assert "Default: " in page or key in ("overall_quantize_config", *ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("round_mod", "did you mean round_mode?"),
        ("qz30", "did you mean QZ301, QZ302, QZ303"),
        ("QZ999", "did you mean QZ"),
        ("foo", "`quantizer explain` lists all codes and keys"),
    ],
)
def test_unknown_name_gets_the_closest_or_the_way_to_all(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", name]) == 2
    assert remedy in capsys.readouterr().err


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*all_codes(), *key_names()]


def test_a_layer_is_passed_on_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ModelOptions]] = []

    def explain_layer(layer: str, options: ModelOptions) -> int:
        seen.append((layer, options))
        return 0

    monkeypatch.setitem(sys.modules, "quantizer.cli.explain_layer", SimpleNamespace(explain_layer=explain_layer))
    assert run_command(["explain", "--config", "c.json", "--model", "m.py", "layer1.0.conv1"]) == 0
    assert seen == [("layer1.0.conv1", ModelOptions(model="m.py", config_file="c.json"))]


@pytest.mark.parametrize("key", setting_names())
def test_a_setting_of_an_algorithm_has_a_page(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", key]) == 0
    printed = capsys.readouterr().out
    [name, *_] = re.findall(r"`quantizer explain (\w+)`", printed)
    assert run_command(["explain", name]) == 0
    assert f"| `{key}` |" in capsys.readouterr().out
