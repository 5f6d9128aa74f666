"""`quantizer tune` and `quantizer run --gate` change a config until the gates hold, and write
what did it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT

from quantizer.cli.main import run_command
from quantizer.commands.searching.trials import Figures, SearchContext, Trial

MODEL = """import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 10),
    )

def calibration_data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(4)]
"""
APART = """
def evaluation_data():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(2)]
"""
Capture = pytest.CaptureFixture[str]
CHANGING = ("run.json", "run.log", ".quantizer.json", "report.html", "tune.json")
"""Files with times, and the page that shows the command."""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a model's file, and a config of 4-bit weights, into the working directory."""
    monkeypatch.chdir(tmp_path)
    preset = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
    preset["tensor_quantize_config"]["weights"]["bit_width"] = 4
    preset["include_bias_corr"] = False
    del preset["$schema"]
    Path("w4.json").write_text(json.dumps(preset, indent=2))

    def written(text: str = MODEL + APART) -> str:
        Path("net.py").write_text(text)
        return "net.py"

    return written


def tuned(model: str, *more: str, config: str = "w4.json", quiet: bool = True) -> int:
    screen = ["-q"] if quiet else []
    return run_command(["tune", *screen, "--config_file", config, "--model", model, *more])


def contents(folder: str) -> dict[str, bytes]:
    files = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and path.name not in CHANGING:
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def tune_json(folder: str = "quantize_result") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "tune.json").read_text())
    return content


def test_a_config_is_changed_until_the_gate_holds_and_the_modes_repeat_it(
    net: Callable[[str], str], capsys: Capture
) -> None:
    model = net(MODEL + APART)
    before = Path("w4.json").read_bytes()
    assert tuned(model, "--gate", "sqnr_db>=21", quiet=False) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 100
    assert printed[0].split() == ["step", "sqnr_db", "MB", "tests", "s", "result"]
    assert any(line.startswith("PASS: gate sqnr_db>=21: met") for line in printed)
    assert Path("w4.json").read_bytes() == before

    content = tune_json()
    rows = content["steps"]
    assert content["met"] and content["data"] == ""
    assert [row["step"] for row in rows[:2]] == ["start", "ranges"]
    figures = [row["metrics"]["sqnr_db"] for row in rows if row["result"] in ("start", "kept")]
    assert figures == sorted(figures) and figures[0] < 21 <= figures[-1]
    report = json.loads(Path("quantize_result/report.json").read_text())
    assert report["metrics"]["sqnr_db"] == figures[-1]

    config = "quantize_result/tuned_config.json"
    text = json.loads(Path(config).read_text())
    assert text["// quantizer tune"] == content["changes"]
    commands = json.loads(Path("quantize_result/run.json").read_text())["commands"]
    for mode in ("calib", "test"):
        words = commands[mode][1:]
        assert run_command([*words, "-q", "--config_file", config, "--output_dir", "two"]) == 0
    again = contents("two")
    for name, content_of_file in contents("quantize_result").items():
        assert name == "tuned_config.json" or again[name] == content_of_file, name


def test_two_climbs_are_the_same(net: Callable[[str], str]) -> None:
    model = net(MODEL + APART)
    results = []
    for _ in range(2):
        assert tuned(model, "--gate", "sqnr_db>=21") == 0
        results.append(contents("quantize_result"))
    assert results[0] == results[1]
    assert "tuned_config.json" in results[0]


def test_without_evaluation_data_a_part_of_the_calibration_data_is_held_back(
    net: Callable[[str], str], capsys: Capture
) -> None:
    model = net(MODEL)
    assert tuned(model, "--gate", "sqnr_db>=18") == 0
    assert "the last 8 samples of 32 judge, and do not calibrate" in capsys.readouterr().out
    info = json.loads(Path("quantize_result/quant_info.json").read_text())
    assert info["header"]["data"]["samples"] == 24
    figure = tune_json()["steps"][-1]["metrics"]["sqnr_db"]
    test = ["--quant_mode", "test", "--model", model, "--skip_len", "24", "--json"]
    capsys.readouterr()
    assert run_command(test) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["sqnr_db"] == figure


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("range(4)", "range(1)"), "has one batch, and there is no other evaluation data"),
        (("manual_seed(2)", "manual_seed(1)"), "are the calibration data"),
    ],
)
def test_data_that_calibration_uses_never_judge(
    net: Callable[[str], str], capsys: Capture, change: tuple[str, str], error: str
) -> None:
    text = MODEL if "range" in change[0] else MODEL + APART.replace("range(2)", "range(4)")
    assert tuned(net(text.replace(*change)), "--gate", "sqnr_db>=18") == 2
    assert error in capsys.readouterr().err
    assert not Path("quantize_result").exists()


def test_a_gate_that_nothing_meets_ends_with_the_best_config_and_exit_1(
    net: Callable[[str], str], capsys: Capture
) -> None:
    assert tuned(net(MODEL + APART), "--gate", "sqnr_db>=200") == 1
    printed = capsys.readouterr()
    assert "error: not met: sqnr_db>=200" in printed.err
    assert "gate sqnr_db>=200: not met" in printed.out
    content = tune_json()
    assert not content["met"] and not content["out_of_time"]
    assert [row["step"] for row in content["steps"]][-1] == "float layers"
    figures = {
        row["result"]: row["metrics"]["sqnr_db"] for row in content["steps"] if "metrics" in row
    }
    assert figures["kept"] > figures["start"]


def test_progress_counts_the_configs_that_were_tested(
    net: Callable[[str], str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.cli.terminal.follow._SECONDS_BETWEEN_LINES", 0.0)
    command = ["tune", "--config_file", "w4.json", "--model", net(MODEL + APART)]
    assert run_command([*command, "--gate", "sqnr_db>=23"]) == 0
    lines = capsys.readouterr().err.splitlines()
    shown = re.compile(r"tune (\d+) tests(: calib \d/4 batches)?.*")
    matches = [match for match in map(shown.fullmatch, lines) if match]
    assert any(match[2] for match in matches)
    counts = [int(match[1]) for match in matches]
    tests = sum(step["tests"] for step in tune_json()["steps"])
    assert counts == sorted(counts) and counts[-1] == tests > 1


def test_a_config_that_meets_the_gate_is_left_as_it_is(
    net: Callable[[str], str], capsys: Capture
) -> None:
    assert tuned(net(MODEL + APART), "--gate", "sqnr_db>=10") == 0
    assert "all gates hold with the config as it is" in capsys.readouterr().out
    assert [row["step"] for row in tune_json()["steps"]] == ["start"]


def test_without_time_the_config_stays_as_it_is(
    net: Callable[[str], str], capsys: Capture
) -> None:
    assert tuned(net(MODEL + APART), "--gate", "sqnr_db>=25", "--minutes", "0") == 1
    assert "not tried: ranges, " in capsys.readouterr().out
    content = tune_json()
    assert content["out_of_time"] and content["changes"] == []
    written = json.loads(Path("quantize_result/tuned_config.json").read_text())
    assert written == json.loads(Path("w4.json").read_text())


def test_an_interrupted_climb_leaves_the_folder_as_it_was(
    net: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(MODEL + APART)
    assert tuned(model, "--gate", "sqnr_db>=10") == 0
    before = contents("quantize_result")
    measure = SearchContext.measure
    measured: list[Trial] = []

    def interrupted(self: SearchContext, trial: Trial) -> Figures:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(trial)
        return measure(self, trial)

    monkeypatch.setattr(SearchContext, "measure", interrupted)
    assert tuned(model, "--gate", "sqnr_db>=25") == 130
    assert contents("quantize_result") == before


def test_run_climbs_if_a_gate_does_not_hold_and_the_next_run_need_not(
    net: Callable[[str], str], capsys: Capture
) -> None:
    run = ["run", net(MODEL + APART), "-q", "--to", "pt2", "--gate", "sqnr_db>=37"]
    assert run_command([*run, "--minutes", "0"]) == 1
    first = Path("quantize_result/quantize_config.json").read_text()
    assert not Path("quantize_result/tune.json").exists()
    capsys.readouterr()
    run.remove("-q")
    assert run_command(run) == 0
    printed = capsys.readouterr()
    announced = "sqnr_db>=37 does not hold: a better config is looked for, for up to 10 minutes"
    assert f"{announced} (--minutes 0 looks for none)" in printed.err
    assert "PASS: gate sqnr_db>=37: met" in printed.out and "kept: " in printed.out
    # The table at the end has the steps
    assert "equalization: " not in printed.err
    text = Path("quantize_result/quantize_config.json").read_text()
    assert json.loads(text)["// quantizer run"] == json.loads(first)["// quantizer run"]
    assert json.loads(text)["// quantizer tune"] == tune_json()["changes"]
    assert Path("quantize_result/export/Sequential.pt2").is_file()
    results = contents("quantize_result")
    assert run_command([*run, "--minutes", "0"]) == 0
    assert contents("quantize_result") == results
    assert not Path("quantize_result/tune.json").exists(), "it was of the calibration before"


def test_run_leaves_a_file_of_the_user_as_it_is(net: Callable[[str], str]) -> None:
    before = Path("w4.json").read_bytes()
    run = ["run", net(MODEL + APART), "-q", "--to", "pt2", "--config_file", "w4.json"]
    assert run_command([*run, "--gate", "sqnr_db>=21"]) == 0
    assert Path("w4.json").read_bytes() == before
    assert Path("quantize_result/tuned_config.json").is_file()


def test_run_without_other_data_says_so(net: Callable[[str], str], capsys: Capture) -> None:
    model = net(MODEL.replace("range(4)", "range(1)"))
    assert run_command(["run", model, "--to", "pt2", "--gate", "sqnr_db>=60"]) == 1
    assert "note: no better config is looked for: " in capsys.readouterr().err


def test_a_gate_about_the_written_file_starts_no_climb(
    net: Callable[[str], str], capsys: Capture
) -> None:
    run = ["run", net(MODEL + APART), "--to", "onnx", "--gate", "onnx_int8_share>=2"]
    assert run_command(run) == 1
    note = "no better config is looked for: only gates about the written file do not hold"
    assert note in capsys.readouterr().err
    assert not Path("quantize_result/tune.json").exists()


def test_a_metric_that_evaluate_does_not_return_is_refused_before_calibration(
    net: Callable[[str], str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: SearchContext, trial: Trial) -> Figures:
        raise AssertionError(trial)

    monkeypatch.setattr(SearchContext, "measure", never)
    evaluate = "\n\ndef evaluate(model, data):\n    return {'accuracy': 0.8}\n"
    assert tuned(net(MODEL + APART + evaluate), "--gate", "acuracy>=0.7") == 2
    assert "did you mean accuracy?" in capsys.readouterr().err


def test_nothing_is_tried_for_a_gate_that_the_float_network_does_not_meet(
    net: Callable[[str], str], capsys: Capture
) -> None:
    evaluate = "\n\ndef evaluate(model, data):\n    return {'top1': 0.8}\n"
    model = net(MODEL + APART + evaluate)
    assert run_command(["run", model, "--to", "pt2", "--gate", "top1>=0.9"]) == 1
    printed = capsys.readouterr()
    assert "relax the bound of top1>=0.9: the float network does not meet it" in printed.out
    assert [row["step"] for row in tune_json()["steps"]] == ["start"]
    assert tuned(model, "--gate", "top1>=0.9", "--overwrite") == 1
    assert "the float network does not meet top1>=0.9 either" in capsys.readouterr().out


def test_a_device_leaves_out_what_it_has_no_place_for(
    net: Callable[[str], str], capsys: Capture
) -> None:
    dpu = str(ROOT / "configs" / "dpu.json")
    asked = ["--gate", "sqnr_db>=200", "--minutes", "1"]
    assert tuned(net(MODEL + APART), *asked, config=dpu) == 1
    rows = {row["step"]: row for row in tune_json()["steps"]}
    assert rows["per channel"]["result"] == "not tried"
    assert "DPU" in " ".join(rows["per channel"]["reasons"] + rows["smoothing"]["reasons"])
    assert rows["equalization"]["result"] != "not tried"


def test_a_config_that_the_target_cannot_hold_is_refused_at_once(
    net: Callable[[str], str], capsys: Capture
) -> None:
    asked = ["--gate", "sqnr_db>=22", "--for", "compressed-tensors"]
    assert tuned(net(MODEL + APART), *asked) == 2
    assert "checkpoints have no place for that" in capsys.readouterr().err
    assert not Path("quantize_result").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--config_file", "w4.json"], "Missing option '--gate'"),
        (["--gate", "sqnr_db>=20"], "Missing option '--config_file'"),
        (["--gate", "sqnr_db>=20", "--minutes", "nan"], "is not a number of minutes"),
        (["--config_file", "w4.json", "--gate", "sqnr_bd>=20"], "there is no metric"),
        (
            ["--config_file", "w4.json", "--gate", "sqnr_db>=20", "--skip_len", "99"],
            "leaves out all",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_is_written(
    net: Callable[[str], str], capsys: Capture, words: list[str], error: str
) -> None:
    model = net(MODEL + APART)
    assert run_command(["tune", "-q", "--model", model, *words]) in (2, 4)
    assert error in capsys.readouterr().err
    assert not Path("quantize_result").exists()
