"""`--fast_finetune` at the shell: what it writes, that it resumes where it stopped, and how it
refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.configs import document
from support.runs import ROOT, calibrate, check, differing

from quantizer.calibration.events import RunStage
from quantizer.cli.main import run_command
from quantizer.results import checkpoint
from quantizer.results.checkpoint import Checkpoints

Toy = Callable[..., str]
Capture = pytest.CaptureFixture[str]
MODEL = (
    "return torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(6, "
    "6), torch.nn.ReLU())))"
)
DATA = "g = torch.Generator().manual_seed(0); m = torch.randn(6, 6, generator=g); "
DATA += "return [torch.randn(16, 6, generator=g) @ m for _ in range(4)]"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """3-bit weights."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(document(tensor={"weights": {"bit_width": 3, "per_channel": True}}))
    )
    return str(path)


@pytest.fixture
def model(toy: Toy) -> str:
    return toy(DATA, MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["adaround", "adaquant"])
def test_finetuned_results_are_tested_and_repeat_byte_for_byte(
    mode: str, model: str, config: str, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("out", "again"):
        assert (
            calibrate(tmp_path / name, "--fast_finetune", mode, model=model, config=config) == 0
        )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not [name for name in names if name.startswith("checkpoint")]
    assert not differing(tmp_path / "out", tmp_path / "again")
    assert calibrate(tmp_path / "plain", model=model, config=config) == 0
    info, plain = (
        json.loads((tmp_path / name / "quant_info.json").read_text())
        for name in ("out", "plain")
    )
    assert info["header"]["fast_finetune"] == mode
    codes, nearest = (
        load_file(tmp_path / name / "weights.safetensors") for name in ("out", "plain")
    )
    assert any(not torch.equal(codes[name], nearest[name]) for name in codes)
    assert (info["tensors"] == plain["tensors"]) is (mode == "adaround")
    capsys.readouterr()
    found = {}
    for name, more in {"out": ["--fast_finetune", mode], "plain": []}.items():
        assert check(tmp_path / name, *more, "--json", model=model) == 0
        found[name] = json.loads(capsys.readouterr().out)["metrics"]["sqnr_db"]
    assert found["out"] > found["plain"]


def test_the_result_is_told(model: str, config: str, tmp_path: Path, capsys: Capture) -> None:
    words = [
        "--quant_mode",
        "calib",
        "--config_file",
        config,
        "--model",
        model,
        "--output_dir",
        str(tmp_path / "out"),
    ]
    assert run_command([*words, "--fast_finetune", "--subset_len", "20"]) == 0
    said = capsys.readouterr().err
    assert "finetuning on 20 samples" in said
    assert "use at least 32" in said
    assert "of 3 layers finetuned" in said
    assert "output SQNR on the calibration data" in said
    assert run_command([*words, "--fast_finetune", "--overwrite"]) == 0
    assert "finetuning on" not in capsys.readouterr().err


def finetuned_layers(stage: RunStage) -> int:
    """How many layers a snapshot of finetuning holds; 0 in other stages. Each has three tensors."""
    return (
        len(stage.snapshot().tensors) // 3
        if stage.saved_as == "finetune" and stage.snapshot
        else 0
    )


@pytest.mark.parametrize("saves", [0.0, 1e9], ids=["killed after a save", "interrupted"])
def test_stopped_then_resumed_equals_undisturbed(
    saves: float,
    model: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """A kill leaves the checkpoint of the last layer that was saved; Ctrl-C saves by itself."""
    original = Checkpoints.advanced
    solved: list[int] = []

    def stopped(self: Checkpoints, stage: RunStage) -> None:
        original(self, stage)
        if finetuned_layers(stage) == 2:
            raise SystemExit(9) if not saves else KeyboardInterrupt

    def counted(self: Checkpoints, stage: RunStage) -> None:
        solved.append(finetuned_layers(stage))
        original(self, stage)

    more = ("--fast_finetune", "adaquant")
    assert calibrate(tmp_path / "whole", *more, model=model, config=config) == 0
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "SAVE_INTERVAL_S", saves)
        patched.setattr(Checkpoints, "advanced", stopped)
        if saves:
            assert calibrate(tmp_path / "out", *more, model=model, config=config) == 130
            assert "fast finetune stopped after" in capsys.readouterr().err
        else:
            assert calibrate(tmp_path / "out", *more, model=model, config=config) == 3
    assert not (tmp_path / "out" / "quant_info.json").exists()
    monkeypatch.setattr(Checkpoints, "advanced", counted)
    assert calibrate(tmp_path / "out", *more, "--resume", model=model, config=config) == 0
    assert next(count for count in solved if count) == 2
    assert not differing(tmp_path / "whole", tmp_path / "out")


def test_a_checkpoint_of_another_mode_is_refused(
    model: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(self: Checkpoints, stage: RunStage) -> None:
        original(self, stage)
        if stage.saved_as == "finetune":
            raise KeyboardInterrupt

    original = Checkpoints.advanced

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "advanced", interrupted)
        assert calibrate(tmp_path / "out", "--fast_finetune", model=model, config=config) == 130
    assert (
        calibrate(
            tmp_path / "out",
            "--fast_finetune",
            "adaquant",
            "--resume",
            model=model,
            config=config,
        )
        == 5
    )
    assert (
        "was finetuning with adaround, and this run has --fast_finetune adaquant"
        in capsys.readouterr().err
    )


def test_data_that_change_between_passes_are_refused(
    toy: Toy, config: str, tmp_path: Path, capsys: Capture
) -> None:
    changing = "import itertools; c = globals().setdefault('count', itertools.count()); "
    model = toy(changing + "return iter([torch.randn(40, 6) + next(c)])", MODEL)
    assert calibrate(tmp_path / "out", "--fast_finetune", model=model, config=config) == 4
    assert (
        "gives different batches when it is read again, and fast finetuning reads it"
        in capsys.readouterr().err
    )


def test_test_mode_refuses_results_that_were_not_finetuned_so(
    model: str, config: str, tmp_path: Path, capsys: Capture
) -> None:
    assert calibrate(tmp_path / "out", model=model, config=config) == 0
    assert check(tmp_path / "out", "--fast_finetune", model=model) == 5
    assert (
        "--fast_finetune adaround: these results were calibrated without it"
        in capsys.readouterr().err
    )
    assert (
        calibrate(tmp_path / "out", "--fast_finetune", "adaquant", model=model, config=config)
        == 0
    )
    assert check(tmp_path / "out", "--fast_finetune", model=model) == 5
    assert "these results were calibrated with adaquant" in capsys.readouterr().err


def test_float_mode_and_the_dpus_scales_are_refused(
    model: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run_command(["--quant_mode", "float", "--model", model, "--fast_finetune"]) == 2
    assert "--fast_finetune needs calib mode" in capsys.readouterr().err
    dpu = str(ROOT / "configs" / "dpu.json")
    assert (
        calibrate(tmp_path / "out", "--fast_finetune", "adaquant", model=model, config=dpu) == 2
    )
    assert "use --fast_finetune adaround" in capsys.readouterr().err
    assert calibrate(tmp_path / "out", "--fast_finetune", model=model, config=dpu) == 0
