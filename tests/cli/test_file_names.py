"""Names of files that are no UTF-8 end no run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.configs import document
from support.generated import imported

from quantizer.cli.main import run_command
from quantizer.errors import ResultError
from quantizer.storage.files import read_json, write_json

MODEL = """import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.NAME = torch.nn.Linear(3, 3)
    def forward(self, x):
        return self.NAME(x)
def model():
    torch.manual_seed(0)
    return Net()
def evaluate(model, data):
    return {"précision": 1.0}
def calibration_data():
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(1))]
"""
ODD = os.fsdecode(b"d\xe9")
"""A name as latin-1 has it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of_such_a_name(tmp_path)


def folder_of_such_a_name(parent: Path) -> Path:
    """Return a folder with a model, a config, weights and data, all with such names."""
    made = parent / ODD
    try:
        made.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    (made / f"{ODD}.py").write_text(MODEL.replace("NAME", "a"), encoding="utf-8")
    (made / f"{ODD}.json").write_text(json.dumps(document()))
    weights = {"a.weight": torch.eye(3), "a.bias": torch.zeros(3)}
    (made / f"{ODD}.safetensors").write_bytes(save(weights))
    (made / "x.safetensors").write_bytes(save({"x": torch.ones(4, 3)}))
    return made


def test_a_run_in_a_folder_of_such_a_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # as main does
    model = ["--model", str(folder / f"{ODD}.py"), "--output_dir", str(folder / "out")]
    model += [
        "--weights",
        str(folder / f"{ODD}.safetensors"),
        "--data",
        str(folder / "x.safetensors"),
    ]
    assert (
        run_command(
            ["--quant_mode", "calib", "--config_file", str(folder / f"{ODD}.json"), *model]
        )
        == 0
    )
    assert (
        run_command(
            ["--quant_mode", "test", *model, "--deploy", "safetensors", "--deploy", "pt2"]
        )
        == 0
    )
    assert capsys.readouterr().out.count("deployed: ") == 2
    assert torch.equal(
        imported(folder / "out" / "Net.py")(torch.zeros(1, 3)), torch.zeros(1, 3)
    )
    options = read_json(folder / "out" / "run.json")["options"]
    assert Path(options["model"]).is_file()
    assert "d\\udce9" in (folder / "out" / "run.json").read_text("utf-8")


def test_what_users_name_in_other_letters_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "é"):
        (tmp_path / f"{name}.py").write_text(MODEL.replace("NAME", name), encoding="utf-8")
    given = ["--output_dir", str(tmp_path / "out")]
    assert (
        run_command(["--quant_mode", "calib", "--model", str(tmp_path / "é.py"), *given]) == 3
    )
    assert "unsupported module or parameter name 'é'" in capsys.readouterr().err
    assert (
        run_command(["--quant_mode", "calib", "--model", str(tmp_path / "a.py"), *given]) == 0
    )
    assert run_command(["--quant_mode", "test", "--model", str(tmp_path / "a.py"), *given]) == 0
    assert "précision" in capsys.readouterr().out


def test_only_bytes_of_names_may_be_halves_of_characters(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"name": ODD})
    assert read_json(path) == {"name": ODD}
    path.write_text('{"name": "\\ud800"}')
    with pytest.raises(ResultError, match="not a readable JSON file"):
        read_json(path)
