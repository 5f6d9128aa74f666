"""Configs with algorithms at the shell: results, test mode, files for other runtimes, resuming,
refusals.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fresh_processes, stand_ins
from support.configs import document
from support.extended import extended
from support.fresh_processes import QUANTIZER
from support.runs import ROOT, calibrate, check, differing

from quantizer import GPTQConfig, SmoothQuantConfig
from quantizer.calibration.events import RunStage
from quantizer.cli.main import run_command
from quantizer.results.checkpoint import Checkpoints

Capture = pytest.CaptureFixture[str]
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.nn.functional.gelu(self.gate(y)) * self.up(y))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    torch.manual_seed(0)
    return Net()

def calibration_data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, 7, 16, generator=g) for _ in range(3)]
"""


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    put_stand_ins(monkeypatch)


def put_stand_ins(patched: pytest.MonkeyPatch) -> None:
    """Put quick algorithms in place of the real ones."""
    patched.setattr(SmoothQuantConfig, "run", "support.stand_ins:doubled")
    patched.setattr(GPTQConfig, "run", "support.stand_ins:coarse")
    stand_ins.SOLVED.clear()


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture
def short(tmp_path: Path) -> str:
    """One block."""
    path = tmp_path / "short.py"
    path.write_text(MODEL.replace("range(3)", "range(1)"))
    return str(path)


@pytest.fixture
def long(tmp_path: Path) -> str:
    """Six blocks, which leave time to kill the process."""
    path = tmp_path / "long.py"
    path.write_text(MODEL.replace("range(3)", "range(6)"))
    return str(path)


def config(
    tmp_path: Path, *names: str, roles: tuple[str, ...] = ("weights", "activation", "input")
) -> str:
    """4-bit weights with a scale per channel, and algorithms."""
    content: dict[str, Any] = document(
        tensor={"weights": {"bit_width": 4, "per_channel": True}}
        if "weights" in roles
        else None
    )
    content["quantizable_data_type"] = list(roles)
    content["algorithms"] = [{"name": name} for name in names]
    path = tmp_path / f"{'_'.join(names) or 'plain'}.json"
    path.write_text(json.dumps(content))
    return str(path)


def info_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "quant_info.json").read_text())
    return found


def summary(folder: Path) -> str:
    """What the log says of the last algorithm."""
    return re.findall(r"gptq: \d+ layers quantized.*", (folder / "run.log").read_text())[-1]


def metrics(folder: Path, model: str, capsys: Capture, *more: str) -> dict[str, float]:
    capsys.readouterr()
    assert check(folder, "--json", *more, model=model) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["metrics"]
    return found


def test_rescaling_by_powers_of_two_keeps_the_network(
    short: str, tmp_path: Path, capsys: Capture
) -> None:
    """Nothing is quantized, so test mode gives the float model to rounding; norms and
    insertions carry the factors.
    """
    path = config(tmp_path, "smoothquant", roles=("bias",))
    assert calibrate(tmp_path / "out", model=short, config=path) == 0
    header = info_of(tmp_path / "out")["header"]
    assert len(header["insertions"]) == 2
    assert any(
        name.endswith("layer_norm") and row["rescaled"]
        for name, row in header["replaced"].items()
    )
    assert [row["name"] for row in header["algorithms"]] == ["smoothquant"]
    assert metrics(tmp_path / "out", short, capsys)["sqnr_db"] > 20


@pytest.mark.slow
def test_results_repeat_and_are_what_the_algorithms_found(
    model: str, tmp_path: Path, capsys: Capture
) -> None:
    path = config(tmp_path, "smoothquant", "gptq")
    for name in ("out", "again"):
        assert calibrate(tmp_path / name, model=model, config=path) == 0
    assert not differing(tmp_path / "out", tmp_path / "again")
    told = json.loads((tmp_path / "out" / "algorithms.json").read_text())
    assert [row["name"] for row in told["algorithms"]] == ["smoothquant", "gptq"]
    assert {row["error"] for row in told["rounded"].values()} == {0.25}
    assert told["remarks"][0]["text"] == "it is in no block"
    info = info_of(tmp_path / "out")
    assert "rescaled.safetensors" in info["header"]["files"]
    assert check(tmp_path / "out", "--config_file", path, model=model) == 0
    assert check(tmp_path / "out", "--config_file", config(tmp_path, "gptq"), model=model) == 5
    assert "its algorithms differ" in capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["layers"]
    # Not against other columns
    assert min(row["local_sqnr_db"] for row in rows if row["tensor"] == "weights") > 5


def test_layers_are_compared_with_the_float_network_as_it_was_rescaled(
    short: str, tmp_path: Path, capsys: Capture
) -> None:
    path = config(tmp_path, "smoothquant", roles=("weights",))
    assert calibrate(tmp_path / "out", model=short, config=path) == 0
    found = metrics(tmp_path / "out", short, capsys)
    assert found["sqnr_db"] > 10


def test_the_generated_code_runs_alone_and_equals_test_mode(short: str, tmp_path: Path) -> None:
    assert (
        calibrate(tmp_path / "out", model=short, config=config(tmp_path, "smoothquant", "gptq"))
        == 0
    )
    assert (
        check(tmp_path / "out", "--deploy", "pt2", "--deploy", "safetensors", model=short) == 0
    )
    spec = importlib.util.spec_from_file_location("generated_net", tmp_path / "out" / "Net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(5))
    program = torch.export.load(tmp_path / "out" / "export" / "Net.pt2").module()
    torch.testing.assert_close(module.Net()(x), program(x))
    verified = json.loads((tmp_path / "out" / "export" / "verify.json").read_text())
    assert {row["equal"] for row in verified.values()} == {1.0}


@pytest.mark.slow
def test_onnx_equals_test_mode(short: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="runs the file (extra: onnx)")
    pytest.importorskip("onnxscript", reason="torch exports with it (extra: onnx)")
    assert (
        calibrate(tmp_path / "out", model=short, config=config(tmp_path, "smoothquant", "gptq"))
        == 0
    )
    assert check(tmp_path / "out", "--deploy", "onnx", model=short) == 0
    (row,) = json.loads((tmp_path / "out" / "export" / "verify.json").read_text()).values()
    assert row["equal"] > 0.95


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run to the end, and the layers that it solved."""
    place = tmp_path_factory.mktemp("undisturbed")
    (place / "net.py").write_text(MODEL)
    path = config(place, "smoothquant", "gptq")
    with pytest.MonkeyPatch.context() as patched:
        put_stand_ins(patched)
        assert calibrate(place / "whole", model=str(place / "net.py"), config=path) == 0
    return place / "whole", list(stand_ins.SOLVED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "after"),
    # In the first block, at the end of one, inside the last one
    [
        ("killed", 1),
        ("killed", 4),
        ("interrupted", 5),
        *extended(("killed", 5), ("interrupted", 1), ("interrupted", 3)),
    ],
)
def test_stopped_then_resumed_equals_undisturbed(
    how: str,
    after: int,
    undisturbed: tuple[Path, list[str]],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """A kill leaves the last block's checkpoint; Ctrl-C saves by itself. Layers that are done
    are not solved again.
    """
    path = config(tmp_path, "smoothquant", "gptq")
    whole, layers = undisturbed
    stand_ins.SOLVED.clear()
    original = Checkpoints.advanced

    def stopped(self: Checkpoints, stage: RunStage) -> None:
        original(self, stage)
        if stage.done == after and stage.name == "gptq":
            raise SystemExit(9) if how == "killed" else KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "advanced", stopped)
        if how == "killed":
            assert calibrate(tmp_path / "out", model=model, config=path) == 3
        else:
            assert calibrate(tmp_path / "out", model=model, config=path) == 130
            assert (
                f"gptq stopped after {after} of 7 groups; --resume continues"
                in capsys.readouterr().err
            )
    assert not (tmp_path / "out" / "quant_info.json").exists()
    before, stand_ins.SOLVED[:] = list(stand_ins.SOLVED), []
    assert calibrate(tmp_path / "out", "--resume", model=model, config=path) == 0
    assert summary(tmp_path / "out") == summary(whole)
    assert not differing(whole, tmp_path / "out")
    assert layers[len(layers) - len(stand_ins.SOLVED) :] == stand_ins.SOLVED
    assert (len(stand_ins.SOLVED) < len(layers)) is (after > 1 or how == "interrupted")
    if how == "interrupted":
        assert before + stand_ins.SOLVED == layers
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_a_checkpoint_of_other_algorithms_or_a_damaged_one_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    original = Checkpoints.advanced

    def stopped(self: Checkpoints, stage: RunStage) -> None:
        original(self, stage)
        if stage.saved_as == "algorithms":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "advanced", stopped)
        assert calibrate(tmp_path / "out", model=model, config=config(tmp_path, "gptq")) == 130
    more = ("--resume",)
    assert (
        calibrate(
            tmp_path / "out", *more, model=model, config=config(tmp_path, "smoothquant", "gptq")
        )
        == 5
    )
    assert "belongs to another run: config differs" in capsys.readouterr().err
    part = next((tmp_path / "out").glob("checkpoint.algorithms.*.safetensors"))
    part.write_bytes(b"")
    assert calibrate(tmp_path / "out", *more, model=model, config=config(tmp_path, "gptq")) == 5
    assert f"{part.name} is damaged" in capsys.readouterr().err


def test_data_that_do_not_fit_are_not_to_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The first layer's inputs can be told from data of another dtype; running it fails."""
    monkeypatch.setattr(GPTQConfig, "run", "quantizer.algorithms.gptq.algorithms:gptq")
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def model():\n    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, "
        "4))\n\n"
        "def example_input():\n    return torch.ones(2, 4)\n\n"
        "def calibration_data():\n    return [torch.ones(2, 4, dtype=torch.float64)]\n"
    )
    assert calibrate(tmp_path / "out", model=str(path), config=config(tmp_path, "gptq")) == 4
    said = capsys.readouterr().err
    assert "batch 0" in said and "--resume" not in said
    assert not (tmp_path / "out" / "quant_info.json").exists()


def test_weights_alone_need_data_too(model: str, tmp_path: Path, capsys: Capture) -> None:
    path = config(tmp_path, "gptq", roles=("weights",))
    assert calibrate(tmp_path / "out", model=model, config=path) == 0
    header = info_of(tmp_path / "out")["header"]
    assert header["batches"] == 3
    assert header["data"]["samples"] == 12
    bare = tmp_path / "bare.py"
    bare.write_text(
        MODEL.partition("def calibration_data")[0]
        + "def example_input():\n    return torch.ones(1, 7, 16)\n"
    )
    assert calibrate(tmp_path / "other", model=str(bare), config=path) == 2
    assert "Missing option '--data'" in capsys.readouterr().err


def test_what_was_done_is_reported(model: str, tmp_path: Path, capsys: Capture) -> None:
    words = [
        "--quant_mode",
        "calib",
        "--model",
        model,
        "--output_dir",
        str(tmp_path / "out"),
        "--config_file",
    ]
    assert run_command([*words, config(tmp_path, "smoothquant", "gptq")]) == 0
    said = capsys.readouterr().err
    assert "smoothquant: 13 layers rescaled, 4 layers inserted" in said
    assert "gptq: 10 layers quantized; median output error 50% of round-to-nearest" in said
    assert "head]/linear: it is in no block" in said
    assert "the rescaled float network's outputs differ by" in said


def test_progress_is_told(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.cli.terminal.follow._SECONDS_BETWEEN_LINES", 0.0)
    words = [
        "--quant_mode",
        "calib",
        "--model",
        model,
        "--output_dir",
        str(tmp_path / "out"),
        "--config_file",
    ]
    assert run_command([*words, config(tmp_path, "gptq")]) == 0
    said = capsys.readouterr().err
    assert re.search(r"^gptq 4/7 groups 57 %", said, re.MULTILINE)
    assert "gptq 7/7 groups 100 %" in said


def test_two_roundings_are_refused(model: str, tmp_path: Path, capsys: Capture) -> None:
    path = config(tmp_path, "gptq")
    assert calibrate(tmp_path / "out", "--fast_finetune", model=model, config=path) == 2
    assert (
        "--fast_finetune adaround and the config's gptq both round the weights"
        in capsys.readouterr().err
    )


def test_finetuning_and_bias_correction_go_on_from_rescaled_weights(
    short: str, tmp_path: Path, capsys: Capture
) -> None:
    path = config(tmp_path, "smoothquant", roles=("weights", "bias"))
    assert calibrate(tmp_path / "out", "--fast_finetune", model=short, config=path) == 0
    assert metrics(tmp_path / "out", short, capsys)["sqnr_db"] > 10
    corrected = json.loads(Path(config(tmp_path, "gptq")).read_text()) | {
        "include_bias_corr": True
    }
    (tmp_path / "corrected.json").write_text(json.dumps(corrected))
    assert (
        calibrate(tmp_path / "corrected", model=short, config=str(tmp_path / "corrected.json"))
        == 0
    )
    assert metrics(tmp_path / "corrected", short, capsys)["sqnr_db"] > 0


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_with_its_last_block(
    long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real GPTQ, in a process of its own, killed when the first checkpoint is there; it
    goes on in this one.
    """
    monkeypatch.setattr(GPTQConfig, "run", "quantizer.algorithms.gptq.algorithms:gptq")
    path = config(tmp_path, "gptq")
    out = tmp_path / "out"
    words = [
        "--quant_mode",
        "calib",
        "--model",
        long,
        "--config_file",
        path,
        "--output_dir",
        str(out),
    ]
    words += ["--subset_len", "64"]
    assert calibrate(tmp_path / "whole", model=long, config=path) == 0
    process = fresh_processes.FreshProcess(QUANTIZER, *words, cwd=ROOT)
    checkpoint = out / "checkpoint.algorithms.json"
    while not process.has_ended() and not checkpoint.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.finished().returncode == -9, "it was done before it could be killed"
    assert not (out / "quant_info.json").exists()
    assert calibrate(out, "--resume", model=long, config=path) == 0
    assert re.search(
        r"the algorithms resume after \d+ groups? of gptq", (out / "run.log").read_text()
    )
    assert not differing(tmp_path / "whole", out)
