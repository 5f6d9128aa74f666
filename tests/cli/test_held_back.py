"""Data that calibrate do not judge without a word: a part of them is held back, or the figures
say which data they are of. Float and quantized networks are measured on the same batches.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import quantizer
from quantizer.cli.main import run_command

MODEL = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
    )

def drawn(sizes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 16, generator=generator).exp() for size in sizes]
"""
ON_CALIBRATION = "measured on the calibration data"
Write = Callable[[str], str]
Capture = pytest.CaptureFixture[str]


def with_sizes(*sizes: int) -> str:
    return f"{MODEL}\ndef calibration_data():\n    return drawn({list(sizes)})\n"


def judged_on(folder: str = "quantize_result") -> dict[str, object] | None:
    report: dict[str, dict[str, object] | None]
    report = json.loads(Path(folder, "report.json").read_text())
    return report["judged_on"]


@pytest.mark.parametrize(
    ("sizes", "first", "last", "asked"),
    [((8, 8, 8, 8), 24, 32, ()), ((22,), 17, 22, ()), ((40,), 24, 32, ("--subset_len", "32"))],
)
def test_a_run_holds_the_last_quarter_back_and_says_how_to_repeat_it(
    write: Write,
    capsys: Capture,
    sizes: tuple[int, ...],
    first: int,
    last: int,
    asked: tuple[str, ...],
) -> None:
    model = write(with_sizes(*sizes))
    assert run_command(["run", model, "--to", "w4", "-o", "one", *asked]) == 0
    printed = capsys.readouterr()
    held_back = last - first
    options = f"--subset_len {first} for calib, --skip_len {first}"
    assert f"the last {held_back} samples of {last} judge, and do not calibrate" in printed.err
    assert options in printed.err
    text = f"on samples {first + 1} to {last}, which did not calibrate"
    assert f"; measured {text}.\n" in printed.out
    assert judged_on("one") == {"samples": held_back, "skipped": first, "text": text}
    step = printed.out.splitlines()[-1]
    calib, test = step.split("`")[1:4:2]
    for command in (calib, test):
        assert run_command([*shlex.split(command)[1:], "-q", "--output_dir", "two"]) == 0
    for name in ("quant_info.json", "layers.csv"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes(), name


@pytest.mark.parametrize(
    ("gate", "options"),
    [
        (("--gate", "sqnr_db>=35"), "--subset_len 24 --skip_len 24 --apply"),
        ((), "--subset_len 24"),
    ],
)
def test_the_next_command_of_a_divided_run_can_be_run(
    write: Write, capsys: Capture, gate: tuple[str, ...], options: str
) -> None:
    model = write(with_sizes(8, 8, 8, 8).replace(".exp()", ".exp() ** 2"))
    asked = ["run", model, "--to", "pt2", "--minutes", "0", "-q", *gate]
    assert run_command(asked) == len(gate) // 2
    command = capsys.readouterr().out.splitlines()[-1].split("`")[1]
    assert command.endswith(f" --model {model} {options}")
    assert run_command(shlex.split(command)[1:]) == 0


def test_few_samples_and_batches_of_a_fixed_size_calibrate_and_judge(
    write: Write, capsys: Capture
) -> None:
    model = write(with_sizes(5, 5, 5))
    assert run_command(["run", model, "-q", "--to", "w4", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    why = "fewer than 16 samples hold nothing back."
    assert any(f"{ON_CALIBRATION}: {why}" in line for line in content["verdict"])
    assert content["test"]["judged_on"]["text"] == "on the calibration data"
    assert judged_on() == {"samples": 15, "skipped": 0, "text": "on the calibration data"}
    fixed = with_sizes(16).replace(
        "Linear(32, 8)\n", "Linear(32, 8), torch.nn.Unflatten(0, (2, 8))\n"
    )
    model = write(fixed)
    assert run_command(["run", model, "-q", "--to", "w4", "-o", "fixed", "--overwrite"]) == 0
    assert ON_CALIBRATION in capsys.readouterr().out


def test_without_calibration_all_samples_judge(write: Write, capsys: Capture) -> None:
    model = write(with_sizes(8, 8, 8, 8))
    assert run_command(["run", model, "-q", "--to", "w8"]) == 0
    assert "; measured on 32 samples.\n" in capsys.readouterr().out
    assert judged_on() == {"samples": 32, "skipped": 0, "text": "on 32 samples"}


def test_test_mode_knows_the_data_of_the_calibration(write: Write, capsys: Capture) -> None:
    def tested(text: str, *options: str) -> str:
        """Return what test mode prints, for a file of another name if there is a text."""
        Path("other.py").write_text(text)
        test = ["--quant_mode", "test", "-q", "--model", "other.py" if text else "net.py"]
        assert run_command([*test, *options]) == 0
        return capsys.readouterr().out

    evaluation = "\ndef evaluation_data():\n    return drawn([8, 8], 1)\n"
    assert run_command(["run", write(with_sizes(22)), "-q", "--to", "w4"]) == 0
    capsys.readouterr()
    # The calibration ends within a batch
    assert "partly on the calibration data: the first 17 of 22" in tested(with_sizes(22))
    assert "partly on the calibration data: the first 9 of 14" in tested("", "--skip_len", "8")
    assert ON_CALIBRATION in tested("", "--subset_len", "8")
    assert "on samples 18 to 22, which did not" in tested("", "--skip_len", "17")
    assert "; measured on 16 samples.\n" in tested(with_sizes(22) + evaluation)
    assert run_command(["run", write(with_sizes(8, 8) + evaluation), "-q", "--to", "w4"]) == 0
    assert ON_CALIBRATION in capsys.readouterr().out


def test_quantize_holds_data_back_and_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    batches = [torch.randn(8, 16).exp() for _ in range(4)]
    done = quantizer.quantize(network, batches, "w4", folder=tmp_path / "one")
    text = "on samples 25 to 32, which did not calibrate"
    assert done.comparison.to_json()["judged_on"]["text"] == text
    assert f"measured {text}." in str(done)
    assert "with it and subset_len=24 repeats this" in str(done)
    # The result keeps the data that did not calibrate
    assert done.result.test().metrics == done.comparison.metrics
    again = quantizer.calibrate(
        network, tmp_path / "one" / "quantize_config.json", batches, subset_len=24
    )
    assert again.test(batches[3:]).metrics == done.comparison.metrics
    assert "measured on the calibration data" in repr(again.test())
    few = quantizer.quantize(network, batches[:1], "w4", folder=tmp_path / "two")
    assert "measured on the calibration data" in str(few)


EVALUATED = """
def evaluate(model, data):
    counts = []
    for _ in range(2):
        counts.append(sum(len(model(batch)) for batch in data))
    first, second = counts
    return {"samples": second, "same": float(first == second)}
"""
CHANGING = """
generator = torch.Generator().manual_seed(1)

def evaluation_data():
    for index in range(3):
        batch = torch.ones(4, 16)
        yield torch.randn(4, 16, generator=generator) if index == 1 else batch
"""
SHRINKING = """
calls = []

def evaluation_data():
    calls.append(1)
    for _ in range(4 - len(calls)):
        yield torch.ones(4, 16)
"""


def test_evaluate_can_read_the_data_twice(write: Write) -> None:
    model = write(with_sizes(8, 8) + EVALUATED)
    assert run_command(["run", model, "-q", "--to", "w8", "--gate", "samples>=16"]) == 0
    report = json.loads(Path("quantize_result/report.json").read_text())
    assert report["pairs"]["same"] == {"float": 1.0, "quantized": 1.0}
    assert report["pairs"]["samples"] == {"float": 16.0, "quantized": 16.0}
    assert run_command(["--quant_mode", "float", "--model", model, "--gate", "same>=1"]) == 0


@pytest.mark.parametrize("gate", [(), ("--gate", "samples>=1")])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (CHANGING, "batch 1 of the data of the model's file is another one"),
        (SHRINKING, "when the data are read again, and "),
    ],
)
def test_a_loader_that_differs_between_passes_is_found_in_test_mode(
    write: Write, capsys: Capture, data: str, words: str, gate: tuple[str, ...]
) -> None:
    once = EVALUATED.replace("range(2)", "range(1)").replace("first, second", "second, first")
    once = once.replace("= counts", "= counts * 2")
    model = write(with_sizes(8, 8) + once + data)
    assert run_command(["run", model, "-q", "--to", "w8", *gate]) == 4
    assert words in capsys.readouterr().err


def test_a_run_takes_the_first_windows_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    monkeypatch.setattr("quantizer.commands.searching.divided_data.MOST_WINDOWS", 20)
    examples = Path(__file__).parents[2] / "examples"
    run = ["run", str(examples / "tales"), "--data", str(examples / "tales.txt"), "--to", "w4"]
    assert run_command([*run, "-o", str(tmp_path / "no"), "--gate", "top1_drop<=0.1"]) == 2
    assert not (tmp_path / "no").exists()
    assert "'top1_drop<=0.1' is not measured" in capsys.readouterr().err
    folder = tmp_path / "few"
    assert run_command([*run, "-o", str(folder), "--minutes", "0"]) == 0
    assert "the first 20 are used: --subset_len N takes more" in capsys.readouterr().err
    calib, test = json.loads((folder / "report.json").read_text())["commands"]
    assert "--subset_len 15" in calib
    assert "--subset_len 5" in test
    assert "--skip_len 15" in test
