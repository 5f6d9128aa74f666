"""`quantizer doctor`: what a run would stumble over, each with its remedy, and an exit code for
CI.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configs import document

from quantizer.cli.main import run_command

Capture = pytest.CaptureFixture[str]
MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    with torch.no_grad():
        net[0].weight[1] *= {widen}
    return net

def calibration_data():
    draw = torch.Generator().manual_seed(0)
    return [{batch} for i in range({count})]
"""
SOUND = {"widen": 1, "batch": "torch.randn(16, 3, 8, 8, generator=draw)", "count": 8}


def check(
    tmp_path: Path, capsys: Capture, config: dict[str, Any] | str, **net: Any
) -> tuple[int, list[dict[str, str]]]:
    (tmp_path / "net.py").write_text(MODEL.format(**(SOUND | net)))
    (tmp_path / "q.json").write_text(config if isinstance(config, str) else json.dumps(config))
    given = ["--config_file", str(tmp_path / "q.json"), "--model", str(tmp_path / "net.py")]
    code = run_command(["doctor", *given, "--output_dir", str(tmp_path / "out"), "--json"])
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    return code, found


def test_a_sound_run_has_nothing_to_warn_of_and_is_left_untouched(
    tmp_path: Path, capsys: Capture
) -> None:
    code, found = check(tmp_path, capsys, document())
    assert code == 0
    assert {row["level"] for row in found} <= {"ok", "note"}
    said = {
        row["part"]: [each["text"] for each in found if each["part"] == row["part"]]
        for row in found
    }
    assert "the data of the model's file: 128 samples in 8 batches" in said["data"]
    assert any("Sequential can be traced: 5 layers" in text for text in said["model"])
    assert any(text.startswith("calib mode takes about ") for text in said["memory"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "net", "part", "level", "text", "remedy"),
    [
        (
            document(),
            {"count": 3},
            "data",
            "warning",
            "48 samples are few",
            "give at least 100",
        ),
        (
            document(),
            {"batch": "torch.ones(16, 3, 8, 8)"},
            "data",
            "error",
            "is constant",
            "check the loader",
        ),
        (
            document(),
            {"batch": "torch.randint(0, 256, (16, 3, 8, 8), generator=draw).float()"},
            "data",
            "warning",
            "has a standard deviation of 7",
            "normalize it as in training",
        ),
        (
            document(),
            {"batch": "torch.full((16, 3, 8, 8), float('nan'))"},
            "model",
            "error",
            "holds NaN or Inf",
            "",
        ),
        (
            document(),
            {
                "batch": "torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(i % "
                "4))"
            },
            "data",
            "warning",
            "4 of 8 batches repeat another batch",
            "do its indices or seeds repeat?",
        ),
        (
            document(),
            {"widen": 40},
            "plan",
            "warning",
            "one scale serves channels",
            "per_channel: true",
        ),
        (document(bit_widht=8), {}, "config", "error", "bit_widht", "known keys here"),
        ("{", {}, "config", "error", "QZ00", ""),
    ],
)
def test_what_would_go_wrong_is_said_with_its_remedy(
    config: dict[str, Any] | str,
    net: dict[str, Any],
    part: str,
    level: str,
    text: str,
    remedy: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    code, found = check(tmp_path, capsys, config, **net)
    assert code == (1 if level == "error" else 0)
    matching = [
        row
        for row in found
        if (row["part"], row["level"]) == (part, level) and text in row["text"]
    ]
    assert matching and remedy in matching[0]["help"], found


def test_people_read_lines_and_a_missing_model_is_one_of_them(
    tmp_path: Path, capsys: Capture
) -> None:
    assert run_command(["doctor", "--model", str(tmp_path / "none.py")]) == 1
    said = capsys.readouterr()
    assert (
        "error   model: there is no file" in said.out
        and "        help: give FILE.py" in said.out
    )
    assert "error: 1 error found" in said.err
