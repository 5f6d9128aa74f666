"""The algorithms themselves, stopped anywhere and resumed, with what they keep in files: the
same bytes as in one run in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configs import document
from support.extended import extended, extended_except
from support.runs import calibrate, differing
from torch import Tensor

from quantizer.calibration.events import RunStage
from quantizer.cli.main import run_command
from quantizer.config.algorithms import ALGORITHMS
from quantizer.results.checkpoint import Checkpoints
from quantizer.storage.deferred_tensor import Spool

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.norm.weight.data[3] *= 20

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(9, 16), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def model():
    torch.manual_seed(0)
    return Net()

def calibration_data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, 7, 9, generator=g) for _ in range(3)]
"""


COMBINED = (("smoothquant", "awq", "gptq"), ("rotation", "gptq"))
RUNS = extended_except(
    [*ALGORITHMS, *map("+".join, COMBINED)], "gptaq", "qronos", *map("+".join, COMBINED)
)
"""`make test` runs each algorithm, alone or behind others."""


class KilledError(Exception):
    """The process dies here."""


def written(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The model and a config with these algorithms, as `calibrate` takes them."""
    model, path = folder / "net.py", folder / "q.json"
    model.write_text(MODEL)
    tensors = {"weights": {"bit_width": 4, "per_channel": True}}
    content: dict[str, Any] = document(tensor=tensors) | {"quantizable_data_type": ["weights"]}
    path.write_text(json.dumps(content | {"algorithms": [{"name": name} for name in names]}))
    return {"model": str(model), "config": str(path)}


@pytest.fixture(autouse=True)
def _killed_by_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test raises counts as an error of quantizer, not of the user's code."""
    monkeypatch.setattr("quantizer.cli.failures.ends_in_user_code", lambda _error: False)


@pytest.mark.slow
@pytest.mark.parametrize("combined", RUNS)
def test_any_stop_and_any_memory_leave_the_same_bytes(
    combined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(combined.split("+"))
    words = written(tmp_path, names)
    assert calibrate(tmp_path / "whole", **words) == 0
    original, seen, resumed = Checkpoints.advanced, [0], 0
    with_spool, spilled = Spool.put, list[Tensor]()

    def stops(self: Checkpoints, stage: RunStage) -> None:
        original(self, stage)
        seen[0] += 1
        if seen[0] % 3 == 2:
            raise KilledError

    monkeypatch.setattr(Checkpoints, "advanced", stops)
    monkeypatch.setattr(
        Spool, "put", lambda self, tensor: spilled.append(tensor) or with_spool(self, tensor)
    )
    code, more = 70, ("--memory", "1B")
    while code == 70:
        code = calibrate(tmp_path / "out", *more, **words)
        more, resumed = ("--resume", "--memory", "1B"), resumed + 1
    assert code == 0
    assert resumed > 1 or seen[0] < 2, "rotation alone needs no data"
    assert spilled or not ALGORITHMS[names[-1]].matrices
    assert not differing(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("first", ["rotation", *extended("smoothquant")])
def test_awq_behind_another_algorithm_goes_on_after_the_last_block(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs are those of the network that the first one left, though many of its own
    factors are folded.
    """
    words = written(tmp_path, (first, "awq"))
    assert calibrate(tmp_path / "whole", **words) == 0
    original, stop_at = Checkpoints.advanced, {3}
    seen: list[int] = []

    def stops(self: Checkpoints, stage: RunStage) -> None:
        original(self, stage)
        if stage.name == "awq" and stage.done not in seen:
            seen.append(stage.done)
            if stage.done in stop_at:
                raise KilledError

    monkeypatch.setattr(Checkpoints, "advanced", stops)
    assert calibrate(tmp_path / "out", **words) == 70
    stop_at.clear()
    assert calibrate(tmp_path / "out", "--resume", **words) == 0
    assert seen == [1, 3, 5, 6]
    assert not differing(tmp_path / "whole", tmp_path / "out")


def test_a_layer_that_would_end_worse_keeps_round_to_nearest_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise without any correlation, in which there is nothing that one weight could make up
    for another.
    """
    words, model = written(tmp_path, ("gptq",)), tmp_path / "net.py"
    model.write_text(
        "import torch\n\ndef model():\n    torch.manual_seed(0)\n    return "
        "torch.nn.Linear(64, 64)\n\n"
        "def calibration_data():\n    draw = torch.Generator().manual_seed(1)\n"
        "    return [torch.randn(64, 64, generator=draw) for _ in range(4)]\n"
    )
    command = [
        "--quant_mode",
        "calib",
        "--model",
        words["model"],
        "--config_file",
        words["config"],
    ]
    assert run_command([*command, "--output_dir", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "algorithms.json").read_text())
    [(layer, row)] = report["rounded"].items()
    assert row["is_rtn"] is True
    assert row["error"] == row["error_rtn"]
    told = "promises no smaller errors"
    assert any(
        remark["layer"] == layer and told in remark["text"] for remark in report["remarks"]
    )
    assert told in capsys.readouterr().err
