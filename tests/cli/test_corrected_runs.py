"""`include_bias_corr` at the shell: what it writes, that test mode and generated code use it,
and how it fails.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import fresh_processes
from support.configs import document
from support.generated import imported
from support.runs import calibrate, check, differing

from quantizer.algorithms.bias_correction import bias_correction
from quantizer.calibration.statistics import ChannelMean
from quantizer.storage.opened_files import json_digest

Toy = Callable[..., str]
Capture = pytest.CaptureFixture[str]
MODEL = (
    "return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, "
    "5, bias=False), torch.nn.ReLU(), torch.nn.Linear(5, 2))"
)
DATA = (
    "g = torch.Generator().manual_seed(0); return [torch.randn(8, 3, generator=g) for _ in "
    "range(4)]"
)
LAYERS = [f"Sequential::Sequential/Linear[{index}]/linear" for index in (0, 2, 4)]


@pytest.fixture
def config(tmp_path: Path) -> str:
    """4-bit weights and bias correction."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(document(tensor={"weights": {"bit_width": 4}}, include_bias_corr=True))
    )
    return str(path)


@pytest.fixture
def model(toy: Toy) -> str:
    return toy(DATA, MODEL)


@pytest.fixture(scope="module")
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Takes the folder that the first test calibrates; the others copy it."""
    return {"place": tmp_path_factory.mktemp("calibrated")}


@pytest.fixture
def folder(calibrated_once: dict[str, Path], model: str, config: str, tmp_path: Path) -> Path:
    once = calibrated_once["place"] / "out"
    if not once.exists():
        assert calibrate(once, model=model, config=config) == 0
    return Path(shutil.copytree(once, tmp_path / "out"))


def test_every_linear_layer_gets_a_correction(folder: Path, model: str) -> None:
    corrections = load_file(folder / "bias_corr.safetensors")
    assert {name: len(tensor) for name, tensor in corrections.items()} == dict(
        zip(LAYERS, (4, 5, 2), strict=True)
    )
    plan = json.loads((folder / "plan.json").read_text())
    assert [row["name"] for row in plan["layers"] if row.get("bias_correction")] == LAYERS
    assert check(folder, model=model) == 0


def test_progress_and_result_are_told_unless_quiet(
    model: str, config: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.cli.terminal.follow._SECONDS_BETWEEN_LINES", 0.0)
    from quantizer.cli.main import run_command

    command = [
        "--quant_mode",
        "calib",
        "--model",
        model,
        "--config_file",
        config,
        "--output_dir",
        str(tmp_path / "o"),
    ]
    assert run_command(command) == 0
    said = capsys.readouterr().err
    assert "bias correction 3/6 layers 50 %" in said
    assert "biases of 3 layers corrected, by at most " in said
    assert run_command([*command, "-q"]) == 0
    assert "bias" not in capsys.readouterr().err


def test_the_generated_file_equals_test_mode_in_another_process(
    folder: Path, model: str, tmp_path: Path
) -> None:
    """And differs from what it is without the corrections."""
    script = (
        "import sys, torch\n"
        f"sys.path[:0] = [{str(folder)!r}, {str(Path(model).parent)!r}]\n"
        "from Sequential import Sequential\nfrom toy import calibration_data\n"
        "torch.save(torch.cat([Sequential()(x) for x in calibration_data()]), "
        f"{str(tmp_path / 'y.pt')!r})\n"
    )
    done = fresh_processes.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    here = imported(folder / "Sequential.py")
    generator = torch.Generator().manual_seed(0)
    expected = torch.cat([here(torch.randn(8, 3, generator=generator)) for _ in range(4)])
    assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), expected)
    (folder / "bias_corr.safetensors").rename(tmp_path / "aside")
    info = json.loads((folder / "quant_info.json").read_text())
    del info["header"]["files"]["bias_corr.safetensors"]
    info["checksum"] = json_digest({"header": info["header"], "tensors": info["tensors"]})
    (folder / "quant_info.json").write_text(json.dumps(info))
    uncorrected = imported(folder / "Sequential.py")
    assert not torch.equal(uncorrected(torch.ones(1, 3)), here(torch.ones(1, 3)))


def test_deployed_files_carry_the_correction(folder: Path, model: str) -> None:
    targets = ["pt2", "safetensors"]
    if importlib.util.find_spec("onnxscript"):
        targets.append("onnx")
    words = [word for target in targets for word in ("--deploy", target)]
    assert check(folder, *words, model=model) == 0
    verified = json.loads((folder / "export" / "verify.json").read_text())
    assert len(verified) == len(targets)
    for figures in verified.values():
        assert (figures["max_difference"], figures["equal"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.unlink(), "bias_corr.safetensors is missing"),
        (
            lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\1"),
            "bias_corr.safetensors was changed after calibration",
        ),
    ],
    ids=["missing", "changed"],
)
def test_corrections_that_are_gone_or_changed(
    folder: Path, model: str, damage: Callable[[Path], None], said: str, capsys: Capture
) -> None:
    damage(folder / "bias_corr.safetensors")
    assert check(folder, model=model) == 5
    assert said in capsys.readouterr().err


def test_calibrating_without_it_removes_the_old_corrections(
    folder: Path, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "without.json"
    path.write_text(json.dumps(document(tensor={"weights": {"bit_width": 4}})))
    assert calibrate(folder, model=model, config=str(path)) == 0
    assert not (folder / "bias_corr.safetensors").exists()
    assert check(folder, model=model) == 0


def same_results(first: Path, second: Path) -> bool:
    assert (first / "bias_corr.safetensors").exists()
    return not differing(first, second)


def test_two_runs_are_byte_identical(
    folder: Path, model: str, config: str, tmp_path: Path
) -> None:
    assert calibrate(tmp_path / "again", model=model, config=config) == 0
    assert same_results(folder, tmp_path / "again")


@pytest.mark.parametrize("calls", [4, 14], ids=["inside a batch", "in the correction"])
def test_interrupted_then_resumed_equals_undisturbed(
    folder: Path,
    model: str,
    config: str,
    calls: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers on four batches: the 4th value is of the second batch, the 13th the first of
    the correction.
    """
    original, seen = ChannelMean.observe, []

    def broken_off(self: ChannelMean, x: torch.Tensor) -> None:
        original(self, x)
        seen.append(x)
        if len(seen) == calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(ChannelMean, "observe", broken_off)
    assert calibrate(tmp_path / "broken", model=model, config=config) == 130
    assert not (tmp_path / "broken" / "quant_info.json").exists()
    monkeypatch.setattr(ChannelMean, "observe", original)
    assert calibrate(tmp_path / "broken", "--resume", model=model, config=config) == 0
    assert same_results(folder, tmp_path / "broken")


def test_interrupted_while_correcting_leaves_no_result(
    model: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bias_correction, "_correct", interrupted)
        assert calibrate(tmp_path / "out", model=model, config=config) == 130
    assert check(tmp_path / "out", model=model) == 5
    assert calibrate(tmp_path / "out", model=model, config=config) == 0
    assert check(tmp_path / "out", model=model) == 0


def test_data_that_differ_when_read_again_are_refused(
    toy: Toy, config: str, tmp_path: Path, capsys: Capture
) -> None:
    model = toy(
        "import os\n    return (torch.full((8, 3), float(os.urandom(1)[0])) for _ in range(9))",
        MODEL,
    )
    assert calibrate(tmp_path / "out", model=model, config=config) == 4
    assert "gives different batches when it is read again" in capsys.readouterr().err
    assert not (tmp_path / "out" / "quant_info.json").exists()


def test_infinite_outputs_of_a_layer_that_nobody_watches(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "weights.json"
    path.write_text(
        json.dumps(document(include_bias_corr=True, quantizable_data_type=["weights"]))
    )
    model = toy(
        "return [torch.full((4, 3), 3e38)] * 2",
        "m = torch.nn.Linear(3, 2); m.weight.data.fill_(9.0); return m",
    )
    assert calibrate(tmp_path / "out", model=model, config=str(path)) == 4
    assert (
        "the bias correction of Linear::Linear/linear is not finite" in capsys.readouterr().err
    )


def test_a_batch_norm_that_cannot_fold_gets_a_correction(
    toy: Toy, config: str, tmp_path: Path
) -> None:
    path = toy(
        DATA,
        "return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU(), "
        "torch.nn.Linear(3, 2))",
    )
    assert calibrate(tmp_path / "out", model=path, config=config) == 0
    corrections = load_file(tmp_path / "out" / "bias_corr.safetensors")
    assert [len(tensor) for tensor in corrections.values()] == [3, 2]
    assert check(tmp_path / "out", model=path) == 0
