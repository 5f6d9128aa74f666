"""`quantizer init`: what it writes is valid, and nothing is overwritten unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.cli.main import run_command
from quantizer.config.load import load_config


@pytest.mark.parametrize("device", ["DPU", "CPU", "GPU"])
def test_written_config_is_valid_for_the_device(device: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--device", device, "-o", str(path)]) == 0
    result = load_config(path)
    assert result.diagnostics == ()
    assert result.require().settings.target_device == device


@pytest.mark.parametrize("strategy", ["weight_only", "static", "dynamic"])
@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_strategies_have_the_hierarchical_form(strategy: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--strategy", strategy, "--device", device, "-o", str(path)]) == 0
    result = load_config(path)
    assert result.diagnostics == ()
    config = result.require()
    assert (config.form, config.settings.target_device) == ("hierarchical", device)
    everywhere = config.rules[1]
    assert everywhere.adds == ({"weights"} if strategy == "weight_only" else {"weights", "input"})
    dynamic = {role: fields["is_dynamic"].value for role, fields in everywhere.fields.items() if role == "input"}
    assert dynamic == {"weight_only": {}, "static": {"input": False}, "dynamic": {"input": True}}[strategy]


@pytest.mark.parametrize("algorithm", ["smoothquant", "awq", "gptq"])
def test_a_strategy_may_be_an_algorithm(algorithm: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--strategy", algorithm, "-o", str(path)]) == 0
    result = load_config(path)
    assert result.diagnostics == ()
    assert [found.name for found in result.require().algorithms] == [algorithm]


def test_the_dpu_has_no_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["init", "--strategy", "static", "--device", "DPU", "-o", "-"]) == 2
    assert "layered form" in capsys.readouterr().err


def test_nothing_is_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.json"
    path.write_text("mine")
    assert run_command(["init", "-o", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "--overwrite" in capsys.readouterr().err
    assert run_command(["init", "-o", str(path), "--overwrite"]) == 0
    assert load_config(path).config is not None


def test_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "-o", "-"]) == 0
    Path("out.json").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config("out.json").config is not None


@pytest.mark.parametrize("target", ["", "missing/folder/net.json"])
def test_places_that_cannot_be_written(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["init", "-o", str(tmp_path / target)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
