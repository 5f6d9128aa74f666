"""The commands with a file of the hierarchical form: counts, origins, and places of what does
not fit the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quantizer.cli.main import run_command

Capture = pytest.CaptureFixture[str]
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.hidden, self.head = nn.Conv2d(3, 8, 3), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.hidden(self.stem(x).relu().flatten(1)).relu())

def model():
    return Net()

def calibration_data():
    yield torch.randn(2, 3, 4, 4)
    raise RuntimeError("read on")
"""
W8 = {"weight": {"dtype": "int8"}}
LEVELS: dict[str, Any] = {
    "global_quant_config": {**W8, "input_tensors": {"dtype": "int8", "is_dynamic": True}},
    "layer_type_quant_config": {"Linear": {"weight": {"dtype": "int4"}}},
    "layer_quant_config": {"head": {"bias": {"dtype": "int16"}}},
    "exclude": ["stem"],
}


def words(folder: Path, command: str, content: dict[str, Any]) -> list[str]:
    """The command for a config and the model, and nothing after the first batch."""
    model, path = folder / "net.py", folder / "q.json"
    model.write_text(MODEL)
    path.write_text(json.dumps(content, indent=1))
    given = {
        "plan": ["plan", "--config_file", str(path)],
        "explain": ["explain", "--config", str(path)],
        "calib": [
            "--quant_mode",
            "calib",
            "--output_dir",
            str(folder / "out"),
            "--config_file",
            str(path),
        ],
    }
    return [*given[command], "--model", str(model)]


def line_of(folder: Path, key: str) -> int:
    """Where the config has a word."""
    text = (folder / "q.json").read_text()
    return text[: text.index(key)].count("\n") + 1


def test_the_plan_counts_layers_and_tensors_of_each_level(
    tmp_path: Path, capsys: Capture
) -> None:
    assert run_command([*words(tmp_path, "plan", LEVELS), "--json"]) == 0
    rules = {row["rule"]: row for row in json.loads(capsys.readouterr().out)["rules"]}
    assert {
        label: len(row["layers"]) for label, row in rules.items() if label != "default"
    } == {
        "global_quant_config": 3,
        'layer_type_quant_config["Linear"]': 2,
        'layer_quant_config["head"]': 1,
        "exclude[0]": 1,
    }
    assert run_command(words(tmp_path, "calib", LEVELS)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ['layer_quant_config["head"]', "head", "1", "1"] in rows
    assert ['layer_type_quant_config["Linear"]', "Linear", "2", "2"] in rows


def test_a_layer_is_explained_with_the_place_of_each_value(
    tmp_path: Path, capsys: Capture
) -> None:
    assert run_command([*words(tmp_path, "explain", LEVELS), "head"]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    places = {line[1]: line[2].split(":")[1] for line in told if line[0] == "dtype"}
    assert places == {
        "int8": str(line_of(tmp_path, '"input_tensors"') + 1),
        "int4": str(line_of(tmp_path, '"int4"')),
        "int16": str(line_of(tmp_path, '"int16"')),
    }


@pytest.mark.parametrize(
    ("blocks", "key", "said", "near"),
    [
        (
            {"layer_quant_config": {"hiden": W8}},
            '"hiden"',
            "matches no layer",
            "closest: hidden",
        ),
        (
            {"layer_quant_config": {"*.hidden": W8}},
            '"*.hidden"',
            "matches no layer",
            "closest: hidden",
        ),
        (
            {"layer_quant_config": {".*hidd.*": W8}},
            '".*hidd.*"',
            "matches no layer",
            "'.*hidd.*' is a glob; as a regular expression it is 're:.*hidd.*'",
        ),
        (
            {"layer_type_quant_config": {"Linaer": W8}},
            '"Linaer"',
            "matches no layer",
            "torch.nn.Linear",
        ),
        ({"exclude": ["haed"]}, '"haed"', "matches no layer", "closest: head"),
    ],
)
def test_what_matches_nothing_has_its_place_and_the_closest_word(
    blocks: dict[str, Any], key: str, said: str, near: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run_command(words(tmp_path, "calib", {"global_quant_config": W8, **blocks})) == 2
    told = capsys.readouterr().err
    assert f"q.json:{line_of(tmp_path, key)}:" in told
    assert said in told
    assert near in told


def test_a_group_size_that_does_not_divide_is_told_for_all_layers_before_data_are_read(
    tmp_path: Path, capsys: Capture
) -> None:
    groups = {"dtype": "int4", "qscheme": "per_group", "group_size": 5, "ch_axis": 1}
    content = {
        "global_quant_config": {"weight": groups, "input_tensors": {"dtype": "int8"}},
        "algo_config": {"name": "awq"},
    }
    assert run_command(words(tmp_path, "calib", content)) == 2
    told = capsys.readouterr().err
    assert f"q.json:{line_of(tmp_path, 'group_size')}:" in told
    assert all(
        re.search(rf"{length} long in weights of \S*{re.escape(path)}", told)
        for path, length in (
            ("Linear[hidden]/linear", 32),
            ("Linear[head]/linear", 16),
            ("Conv2d[stem]/conv2d", 3),
        )
    )
