"""What a run tells of its refinements: what it cannot go on with, what it did not do, and what
is no noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.configs import document
from support.runs import calibrate, check

from quantizer.algorithms.finetuning import network as finetuning
from quantizer.errors import DataError

Toy = Callable[..., str]
Capture = pytest.CaptureFixture[str]
LAYERS = (
    "return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))"
)
DATA = "torch.manual_seed(1)\n    return [torch.randn(16, 3) for _ in range(4)]"


def config_file(folder: Path, **settings: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(document(tensor={"weights": {"bit_width": 4}}, **settings)))
    return str(path)


def test_a_checkpoint_of_finetuning_is_not_dropped(
    toy: Toy, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config, out = toy(DATA, LAYERS), config_file(tmp_path), tmp_path / "out"

    def broken(*args: object, **kwargs: object) -> None:
        raise DataError("stopped on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "fast_finetune", broken)
        assert calibrate(out, "--fast_finetune", model=model, config=config) == 4
    capsys.readouterr()
    assert calibrate(out, "--resume", model=model, config=config) == 5
    assert (
        "was finetuning with adaround, and this run has no --fast_finetune"
        in capsys.readouterr().err
    )
    assert calibrate(out, "--resume", "--fast_finetune", model=model, config=config) == 0
    assert check(out, "--fast_finetune", model=model) == 0


def test_finetuning_that_finds_nothing_says_so(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    model = toy("return [torch.randn(4, 3)]", "return torch.nn.ReLU()")
    assert calibrate(tmp_path / "out", "--fast_finetune", model=model, config=None) == 0
    assert "nothing to finetune" in capsys.readouterr().err
    assert check(tmp_path / "out", "--fast_finetune", model=model) == 5
    assert "calibrated without it" in capsys.readouterr().err


def test_a_corrected_bias_is_no_noise(toy: Toy, tmp_path: Path) -> None:
    """The same bias shows the same noise whether it was corrected or not."""
    noise = []
    for corrected in (False, True):
        out = tmp_path / str(corrected)
        config = config_file(tmp_path, include_bias_corr=corrected)
        assert calibrate(out, model=toy(DATA, LAYERS), config=config) == 0
        assert check(out, model=toy(DATA, LAYERS)) == 0
        rows = json.loads((out / "report.json").read_text())["layers"]
        noise.append(
            {row["layer"]: row["local_sqnr_db"] for row in rows if row["tensor"] == "bias"}
        )
    assert len(noise[0]) == 2
    assert noise[0] == noise[1]


def test_a_first_batch_that_does_not_fit_is_the_datas_fault(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    model = toy("return [torch.ones(4, 5)]", LAYERS)
    assert calibrate(tmp_path / "out", model=model, config=None) == 4
    assert (
        "running the model on the first batch ([4, 5] float32) raised RuntimeError"
        in capsys.readouterr().err
    )


def test_a_first_batch_with_a_name_that_forward_does_not_have_is_the_datas_fault(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    model = toy("return [{'images': torch.ones(4, 3)}]", LAYERS)
    assert calibrate(tmp_path / "out", model=model, config=None) == 4
    said = capsys.readouterr().err
    assert (
        "batch 0 of the data of the model's file has the key 'images'" in said
        and "forward() of the model takes input" in said
    )


def test_another_models_files_leave_the_folder(toy: Toy, tmp_path: Path) -> None:
    out, named = (
        tmp_path / "out",
        "return type('{}', (torch.nn.Sequential,), {{}})(torch.nn.Linear(3, 2))",
    )
    assert calibrate(out, model=toy(model=named.format("First")), config=None) == 0
    (out / "notes.txt").write_text("mine")
    assert (
        calibrate(out, "--overwrite", model=toy(model=named.format("Second")), config=None) == 0
    )
    assert {path.name for path in out.glob("*.py")} == {"Second.py"}
    assert (out / "notes.txt").exists()
