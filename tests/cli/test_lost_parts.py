"""A lost part of an output: in the terminal, the report, run.json, annotations, files that are
deployed, and gates.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.runs import calibrate, check

from quantizer.cli.main import run_command

DETECTOR = """
import torch
from torch import nn

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Conv1d(3, 4, 1), nn.Conv1d(3, 3, 1)

    def forward(self, x):
        return torch.cat([self.boxes(x).sigmoid() * 640, self.scores(x).sigmoid()], 1)

def model():
    torch.manual_seed(0)
    return Detector().eval()

def calibration_data():
    return [torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
"""
LOST = "0.scores is 0 everywhere in the quantized network"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector calibrated for the DPU, which has one scale for all that a concatenation
    joins.
    """
    folder = tmp_path_factory.mktemp("detector")
    (folder / "net.py").write_text(DETECTOR)
    assert calibrate(folder / "out", model=str(folder / "net.py"), config=None) == 0
    return folder


@pytest.fixture
def detector(made: Path, tmp_path: Path) -> tuple[str, Path]:
    """Its file, and a copy of the results."""
    return str(made / "net.py"), Path(shutil.copytree(made / "out", tmp_path / "out"))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


@pytest.mark.slow
def test_a_lost_part_is_said_everywhere(
    detector: tuple[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, folder = detector
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert check(folder, "--deploy", "pt2", model=model, quiet=False) == 0
    shown = capsys.readouterr()
    assert re.search(r"^sqnr_db 0$", shown.out, re.MULTILINE)
    assert re.search(r"^sqnr_db_pooled 4\d\.", shown.out, re.MULTILINE)
    assert re.search(r"^0\.scores +0\[4:7\] +float +0\.00", shown.out, re.MULTILINE)
    assert f"\n{LOST}" in f"\n{shown.err}"
    blame = "The cause is the activation of Detector::Detector/cat"
    assert re.search(rf"^::warning .*title=quantizer::{LOST}.*{blame}", shown.err, re.MULTILINE)
    report, run = read(folder, "report.json"), read(folder, "run.json")
    [warning] = report["warnings"]
    assert run["warnings"] == [warning]
    assert (warning["kind"], warning["output"], warning["layer"]) == (
        "constant",
        "0.scores",
        "Detector::Detector/cat",
    )
    rows = {row["name"]: row for row in report["outputs"]}
    assert {name: row["values"] for name, row in rows.items()} == {
        "0": 3 * 448,
        "0.boxes": 3 * 256,
        "0.scores": 3 * 192,
    }
    assert report["metrics"]["sqnr_db"] == rows["0.scores"]["sqnr_db"] == 0
    assert report["metrics"]["sqnr_db_pooled"] == rows["0"]["sqnr_db"]
    page = (folder / "report.html").read_text("utf-8")
    assert f'<p class="warning">{LOST}' in page
    assert "0.scores differs most from float, by 100 % (SQNR 0.0 dB)" in page
    [file] = read(folder, "export/verify.json").values()
    assert any(f"in test mode already: {LOST}" in remark for remark in file["remarks"])
    assert [part["name"] for part in file["parts"]] == ["0.boxes", "0.scores"]


def test_a_gate_may_be_about_one_part(
    detector: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = detector
    gates = [
        ("sqnr_db[0.boxes]>=30", 0),
        ("sqnr_db[0[0:4]] >= 30", 0),
        ("cosine[0.boxes]>0.99", 0),
        ("sqnr_db_pooled>=30", 0),
        ("sqnr_db[0.scores]>=30", 1),
        ("sqnr_db>=30", 1),
        ("equal_outputs[0]>=0.5", 1),
    ]
    for gate, code in gates:
        assert check(folder, "--gate", gate, model=model) == code, gate
    capsys.readouterr()


def test_a_part_that_does_not_exist_is_refused_before_the_run(
    detector: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = detector
    for gate, near in {
        "sqnr_db[0.score]>=30": "sqnr_db[0.scores]",
        "sqnr[0.boxes]>1": "sqnr_db[0.boxes]",
    }.items():
        assert check(folder, "--gate", gate, model=model) == 2
        assert f"did you mean {near}?" in capsys.readouterr().err
    assert check(folder, "--gate", "rows_kept>=1", model=model) == 2
    assert "there is no metric 'rows_kept'" in capsys.readouterr().err
    assert read(folder, "report.json")["metrics"] == {}
    arguments = ["--quant_mode", "float", "--model", model, "--gate", "sqnr_db[0.boxes]>=30"]
    assert run_command(arguments) == 2


def test_plan_lists_the_names(
    detector: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = detector
    config = str(Path(__file__).parents[2] / "configs" / "cpu_int8.json")
    assert run_command(["plan", "--config_file", config, "--model", model]) == 0
    assert (
        "output 0, in 2 parts: 0.boxes or 0[0:4], 0.scores or 0[4:7]" in capsys.readouterr().out
    )
    assert run_command(["plan", "--config_file", config, "--model", model, "--json"]) == 0
    [output] = json.loads(capsys.readouterr().out)["outputs"]
    assert [(part["name"], part["index"]) for part in output["parts"]] == [
        ("0.boxes", "0[0:4]"),
        ("0.scores", "0[4:7]"),
    ]


def test_json_has_outputs_and_warnings(
    detector: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = detector
    assert check(folder, "--json", model=model) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in content["outputs"]] == ["0", "0.boxes", "0.scores"]
    assert [warning["output"] for warning in content["warnings"]] == ["0.scores"]


@pytest.mark.parametrize(
    ("value", "is_said"), [("0.5", False), ("float(model(next(iter(data))).max())", True)]
)
def test_a_low_sqnr_needs_no_sentence_where_the_task_is_held(
    value: str,
    is_said: bool,
    detector: tuple[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A network of two bits has few dB, and a metric that says that it is as good, or as
    bad.
    """
    path = tmp_path / "net.py"
    text = DETECTOR.replace(
        "torch.cat([self.boxes(x).sigmoid() * 640, self.scores(x).sigmoid()], 1)",
        "self.boxes(x)",
    )
    path.write_text(f"{text}\ndef evaluate(model, data):\n    return {{'ap': {value}}}\n")
    config = tmp_path / "two.json"
    config.write_text(
        '{"global_quant_config": {"weight": {"dtype": "int2", "qscheme": "per_tensor"}}}'
    )
    assert calibrate(tmp_path / "two", model=str(path), config=str(config)) == 0
    capsys.readouterr()
    assert check(tmp_path / "two", model=str(path)) == 0
    metrics = read(tmp_path / "two", "report.json")["metrics"]
    assert metrics["sqnr_db"] < 15
    assert ("few networks are usable" in capsys.readouterr().err) is is_said


def test_analyze_finds_what_has_to_stay_in_float_for_one_part(
    detector: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = detector
    preset = json.loads((Path(__file__).parents[2] / "configs" / "cpu_int8.json").read_text())
    preset["overall_quantize_config"]["bit_width"] = 3
    config = tmp_path / "three.json"
    config.write_text(json.dumps(preset))
    arguments = ["analyze", "--config_file", str(config), "--model", model, "--json"]
    assert run_command([*arguments, "--metric", "sqnr_db[0.score]>=30"]) == 2
    assert "did you mean sqnr_db[0.scores]?" in capsys.readouterr().err
    assert run_command([*arguments, "--metric", "sqnr_db[0.scores]>=30"]) == 0
    found = json.loads(capsys.readouterr().out)
    before, after = found["metrics"]["before"], found["metrics"]["after"]
    assert before["sqnr_db[0.scores]"] < 30
    assert after["sqnr_db[0.scores]"] is None or after["sqnr_db[0.scores]"] >= 30
    assert found["float"]
