"""`X_drop` is loss of quality, whichever way X is good; which way that is, names or the model's
file say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import calibrate, check
from torch import nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import GateError, UsageError

Capture = pytest.CaptureFixture[str]

MODEL = """
import torch


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def calibration_data():
    return [torch.ones(4, 3)] * 4
"""
EVALUATE = """

def evaluate(model, data):
    for batch in data:
        model(batch)
    is_float = type(model).__name__ == "Linear"
    calls.append(is_float)
    assert is_float or not refuses_quantized
    return {name: (1.0 if is_float else 3.0) for name in names}


calls = []
refuses_quantized = False
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the toy that all tests here evaluate."""
    place = tmp_path_factory.mktemp("directions")
    (place / "toy.py").write_text(MODEL)
    assert calibrate(place / "out", model=str(place / "toy.py")) == 0
    return place / "out"


def evaluated(tmp_path: Path, names: list[str], more: str = "") -> str:
    """The toy's file with an `evaluate` whose metrics rise from 1 to 3 in quantization."""
    path = tmp_path / "toy.py"
    path.write_text(f"{MODEL}{EVALUATE}\nnames = {names!r}\n{more}\n")
    return str(path)


def drops(folder: Path, model: str, *more: str) -> dict[str, float]:
    """Test the model; returns what each metric has lost."""
    assert check(folder, *more, model=model) == 0
    metrics = json.loads((folder / "report.json").read_text())["metrics"]
    return {name: value for name, value in metrics.items() if name.endswith("_drop")}


def test_names_say_which_way_a_metric_is_good(folder: Path, tmp_path: Path) -> None:
    lower = ["perplexity", "loss", "mae", "mse", "rmse", "wer", "cer", "eer", "fid"]
    lower += ["val_loss", "mae_m", "loss/val", "Test.MSE", "wer@clean", "val loss", "iou_loss"]
    lower += ["false_accepts", "false_rejects_per_hour", "error_rate", "RMSLE", "bpb", "frr"]
    higher = [
        "top1",
        "top5",
        "top_5",
        "top-10",
        "accuracy",
        "acc",
        "f1_macro",
        "mAP@0.5",
        "map50",
        "val-mIoU",
    ]
    higher += ["auc", "bleu", "PSNR", "ssim"]
    unknown = [
        "mean",
        "lossless",
        "neg_mse",
        "map_mse",
        "latency",
        "mapping",
        "top_speed",
        "stop1",
    ]
    found = drops(folder, evaluated(tmp_path, [*lower, *higher, *unknown]))
    assert found == {f"{name}_drop": 2.0 for name in lower} | {
        f"{name}_drop": -2.0 for name in higher
    }


@pytest.mark.parametrize(
    ("gate", "code"),
    [("mae_drop<=0.1", 1), ("mae_rise<=0.1", 1), ("mae_rise<=2", 0), ("mae<=1", 1)],
)
def test_a_gate_on_a_drop_fails_where_the_error_grows(
    folder: Path, tmp_path: Path, gate: str, code: int
) -> None:
    assert check(folder, "--gate", gate, model=evaluated(tmp_path, ["mae"])) == code


@pytest.mark.parametrize(
    ("names", "more", "drop"),
    [
        (["ripple"], 'LOWER_IS_BETTER = {"ripple"}', 2.0),
        (["ripple"], 'HIGHER_IS_BETTER = ["ripple"]', -2.0),
        (["top1"], 'LOWER_IS_BETTER = ("top1",)', 2.0),
        (["loss"], 'HIGHER_IS_BETTER = frozenset({"loss"})', -2.0),
    ],
)
def test_a_file_declares_what_its_metrics_mean(
    folder: Path, tmp_path: Path, names: list[str], more: str, drop: float
) -> None:
    assert drops(folder, evaluated(tmp_path, names, more)) == {f"{names[0]}_drop": drop}


def test_the_file_of_evaluate_goes_before_that_of_the_model(
    folder: Path, tmp_path: Path
) -> None:
    model = evaluated(tmp_path, [], 'HIGHER_IS_BETTER = {"ripple", "gap"}')
    other = tmp_path / "metrics.py"
    other.write_text(f'{EVALUATE}\nnames = ["ripple", "gap"]\nLOWER_IS_BETTER = {{"ripple"}}\n')
    assert drops(folder, model, "--evaluate", str(other)) == {
        "ripple_drop": 2.0,
        "gap_drop": -2.0,
    }


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('LOWER_IS_BETTER = "mae"', "is a str, not a set of names"),
        ("LOWER_IS_BETTER = 3", "is an int, not a set of names"),
        ('HIGHER_IS_BETTER = {"mae": True}', "is a dict, not a set of names"),
        ("HIGHER_IS_BETTER = {1}", "holds an int, not only names"),
        ('LOWER_IS_BETTER = HIGHER_IS_BETTER = {"mae"}', 'both name "mae"'),
    ],
)
def test_a_declaration_that_is_none_is_refused(
    folder: Path, tmp_path: Path, capsys: Capture, more: str, said: str
) -> None:
    assert check(folder, model=evaluated(tmp_path, ["mae"], more)) == 3
    assert said in capsys.readouterr().err


def test_a_declared_name_that_no_metric_has_is_a_warning(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert (
        check(folder, model=evaluated(tmp_path, ["ripple"], 'LOWER_IS_BETTER = {"riple"}')) == 0
    )
    assert 'a direction is declared for "riple"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (
            "ripple_drop<=0.1",
            'write LOWER_IS_BETTER = {"ripple"} or HIGHER_IS_BETTER = {"ripple"}',
        ),
        ("riple<=0.1", "did you mean ripple?"),
        ("top1>=0.5", "there is no metric 'top1'"),
        ("equal_outputs>=0.5", "is not measured: the model returns only"),
    ],
)
@pytest.mark.parametrize("command", ["test", "analyze"])
def test_a_gate_on_what_nobody_measures_ends_before_the_quantized_network_runs(
    folder: Path, tmp_path: Path, capsys: Capture, command: str, gate: str, said: str
) -> None:
    model = evaluated(tmp_path, ["ripple"], "refuses_quantized = True")
    if command == "test":
        assert check(folder, "--gate", gate, model=model) == 2
    else:
        config = str(Path(__file__).parents[2] / "configs" / "cpu_int8.json")
        assert (
            run_command(
                ["analyze", "--metric", gate, "--config_file", config, "--model", model]
            )
            == 2
        )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "test", "tune", "analyze"])
def test_an_unknown_direction_is_asked_for_before_the_model_opens(
    folder: Path, tmp_path: Path, capsys: Capture, command: str
) -> None:
    model = evaluated(tmp_path, ["lag"], "def model():\n    raise ValueError('it opens')")
    config = str(Path(__file__).parents[2] / "configs" / "cpu_int8.json")
    gate = "lag_rise<=0.1"
    options = {
        "run": ["run", model, "--gate", gate],
        "test": ["--quant_mode", "test", "--model", model, "-o", str(folder), "--gate", gate],
        "tune": ["tune", "--config_file", config, "--model", model, "--gate", gate],
        "analyze": ["analyze", "--config_file", config, "--model", model, "--metric", gate],
    }
    assert run_command(options[command]) == 2
    said = capsys.readouterr().err
    assert "whether less or more of 'lag' is better is not known" in said
    assert 'LOWER_IS_BETTER = {"lag"}' in said
    # What is declared, misspelt, or returned under this name is a question for later
    for more in ('LOWER_IS_BETTER = {"lag"}', 'names = ["log"]', 'names = ["lag_rise"]'):
        opens = f"def model():\n    raise ValueError('it opens')\n{more}"
        names = ["lag"] if "LOWER" in more else []
        evaluated(tmp_path, names, opens)
        assert run_command(options[command]) == 3
        assert "it opens" in capsys.readouterr().err


def test_a_rise_is_no_loss_where_more_is_better(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert check(folder, "--gate", "top1_rise<=1", model=evaluated(tmp_path, ["top1"])) == 2
    assert "did you mean top1_drop?" in capsys.readouterr().err


DATA = {
    "none": "[torch.ones(4, 3)]",
    "regression": "[(torch.ones(4, 3), torch.ones(4, 2))]",
    "labels": "[(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]",
}


@pytest.mark.parametrize(
    ("data", "gate", "said"),
    [
        ("none", "top1>=0.5", "the data has no targets"),
        ("none", "top1_drop<=0.1", "the data has no targets"),
        ("regression", "top1_float>=0.5", "the targets are not one class"),
        ("labels", "perplexity<=9", "the targets are not the tokens"),
        ("labels", "perplexity_ratio<=1.1", "the targets are not the tokens"),
        ("labels", "equal_outputs>=0.5", "the model returns only"),
    ],
)
def test_without_evaluate_it_ends_before_any_network_runs(
    folder: Path, tmp_path: Path, capsys: Capture, data: str, gate: str, said: str
) -> None:
    model = tmp_path / "toy.py"
    model.write_text(f"{MODEL}\ndef evaluation_data():\n    return {DATA[data]}\n")
    before = (folder / "layers.csv").read_bytes() if (folder / "layers.csv").exists() else None
    assert check(folder, "--gate", gate, model=str(model)) == 2
    assert f"--gate '{gate}' is not measured: {said}" in capsys.readouterr().err
    assert ((folder / "layers.csv").read_bytes() if before else None) == before


def test_float_mode_without_targets_ends_before_the_model_runs(
    tmp_path: Path, capsys: Capture
) -> None:
    model = tmp_path / "toy.py"
    model.write_text(MODEL)
    assert (
        run_command(["--quant_mode", "float", "--model", str(model), "--gate", "top1>=0.5"])
        == 2
    )
    assert "is not measured: the data has no targets" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["float", "test"])
def test_a_gate_that_holds_is_printed(
    folder: Path, tmp_path: Path, capsys: Capture, mode: str
) -> None:
    model = evaluated(tmp_path, ["mae"], 'names = {"mae": 0}')
    gates = ["--gate", "mae<=3.001", "--gate", "mae >= 0.5"]
    where = ["--quant_mode", mode, "--model", model, "--output_dir", str(folder), "-q"]
    assert run_command([*where, *gates]) == 0
    value = "1" if mode == "float" else "3"
    lines = capsys.readouterr().out.splitlines()
    assert f"PASS: gate mae<=3.001: met ({value}); gate mae >= 0.5: met ({value})" in lines
    assert run_command([*where, *gates, "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_python_has_the_same_directions() -> None:
    model, data = nn.Linear(3, 2).eval(), [torch.ones(4, 3)]
    config = str(Path(__file__).parents[2] / "configs" / "cpu_int8.json")
    calibrated = quantizer.calibrate(model, config, data)

    def evaluate(network: Any, batches: Any) -> dict[str, float]:
        return dict.fromkeys(("mae", "gap", "top1"), 1.0 if network is model else 3.0)

    tested = calibrated.test(data, evaluate, lower_is_better={"gap"})
    assert [tested.metrics[f"{name}_drop"] for name in ("mae", "gap", "top1")] == [
        2.0,
        2.0,
        -2.0,
    ]
    assert tested.require(mae=3.5, gap_drop=2.5, gap_rise=2.5, top1=2.5) is tested
    with pytest.raises(GateError, match="not met: mae<=2, gap_drop<=1, top1>=4"):
        tested.require(mae=2, gap_drop=1, top1=4)
    undeclared = calibrated.test(data, evaluate)
    with pytest.raises(
        UsageError, match="whether less or more of 'gap' is better is not known"
    ):
        undeclared.require(gap_drop=1)
    with pytest.raises(UsageError, match='both name "gap"'):
        calibrated.test(data, evaluate, lower_is_better={"gap"}, higher_is_better={"gap"})
    with pytest.raises(UsageError, match="lower_is_better is a str, not a set of names"):
        calibrated.test(data, evaluate, lower_is_better="gap")
