"""`quantizer diff --fail-on worse` judges each output and part, and metrics of which it is
known which way is good.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.configs import document, layer
from support.extended import extended
from support.runs import calibrate, check

from quantizer.cli.main import run_command

Capture = pytest.CaptureFixture[str]
MODEL = """
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x):
        return %s


def model():
    torch.manual_seed(0)
    return Detector().eval()


def calibration_data():
    return [torch.randn(16, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
"""
OUTPUTS = {
    "two": '{"boxes": self.boxes(x) * 640, "scores": self.scores(x)}',
    "joined": "torch.cat([self.boxes(x) * 640, self.scores(x)], 1)",
}
EVALUATE = """

def evaluate(model, data):
    for batch in data:
        model(batch)
    return {values!r}
"""
WEIGHTS = ["weights"]


def calibrated(place: Path, outputs: str, bits: Mapping[str, int | None]) -> Path:
    """The results of a detector whose layers have weights of so many bits, or float ones."""
    model = place / "calibrated.py"
    model.write_text(MODEL % outputs)
    entries = []
    for path, width in bits.items():
        roles = [] if width is None else WEIGHTS
        entries.append(
            layer(
                f"Detector::Detector/Linear[{path}]/linear", roles=roles, bit_width=width or 8
            )
        )
    config = place / "config.json"
    config.write_text(json.dumps(document(*entries, quantizable_data_type=WEIGHTS)))
    assert calibrate(place / "out", "--config_file", str(config), model=str(model)) == 0
    return place / "out"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Gives result folders that are tested with what a model's file says more; calibrations
    that are alike are done once.
    """
    known: dict[str, Path] = {}

    def of(
        place: Path, name: str, outputs: str, bits: Mapping[str, int | None], more: str = ""
    ) -> str:
        key = f"{outputs} {bits}"
        if key not in known:
            known[key] = calibrated(tmp_path_factory.mktemp("calibrated"), outputs, bits)
        folder = Path(shutil.copytree(known[key], place / name))
        model = place / f"{name}.py"
        model.write_text(MODEL % outputs + more)
        assert check(folder, model=str(model)) == 0
        return str(folder)

    return of


def difference(first: str, second: str, capsys: Capture) -> tuple[int, dict[str, Any], str]:
    """The exit code of --fail-on worse, what it found, and what it said."""
    capsys.readouterr()
    code = run_command(["diff", first, second, "--json", "--fail-on", "worse"])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


@pytest.mark.parametrize(("outputs", "prefix"), [("two", ""), ("joined", "0.")])
def test_a_part_that_got_worse_fails_though_the_worst_one_and_all_together_did_not(
    tmp_path: Path, results: Callable[..., str], capsys: Capture, outputs: str, prefix: str
) -> None:
    first = results(tmp_path, "first", OUTPUTS[outputs], {"boxes": 3, "scores": 8})
    second = results(tmp_path, "second", OUTPUTS[outputs], {"boxes": 3, "scores": 5})
    code, found, said = difference(first, second, capsys)
    assert "sqnr_db" not in found["figures"], "the boxes are worst in both"
    assert code == 1
    assert set(found["worse"]) >= {f"sqnr_db[{prefix}scores]"}
    assert not any("boxes" in name for name in found["worse"])
    assert f"sqnr_db[{prefix}scores]" in said
    code, found, _ = difference(second, first, capsys)
    assert (code, found["worse"]) == (1, ["weight_bytes"])


def test_an_output_without_a_loss_is_better_than_any_with_one(
    tmp_path: Path, results: Callable[..., str], capsys: Capture
) -> None:
    first = results(tmp_path, "first", OUTPUTS["two"], {"boxes": 8, "scores": None})
    second = results(tmp_path, "second", OUTPUTS["two"], {"boxes": 8, "scores": 8})
    code, found, _ = difference(first, second, capsys)
    assert code == 1 and "sqnr_db[scores]" in found["worse"]
    assert found["figures"]["sqnr_db[scores]"][0] is None
    code, found, _ = difference(second, first, capsys)
    assert "sqnr_db[scores]" not in found["worse"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "values", "declared", "is_worse"),
    [
        ("val_loss", (1.0, 2.0), "", True),
        ("f1", (0.9, 0.8), "", True),
        *extended(("val_loss", (2.0, 1.0), "", False)),
        ("ripple", (1.0, 2.0), 'LOWER_IS_BETTER = {"ripple"}', True),
        ("ripple", (1.0, 2.0), 'HIGHER_IS_BETTER = {"ripple"}', False),
        ("loss", (2.0, 1.0), 'HIGHER_IS_BETTER = {"loss"}', True),
    ],
)
def test_metrics_are_judged_as_gates_judge_them(
    tmp_path: Path,
    results: Callable[..., str],
    capsys: Capture,
    metric: str,
    values: tuple[float, float],
    declared: str,
    is_worse: bool,
) -> None:
    folders = []
    for name, value in zip(("first", "second"), values, strict=True):
        more = EVALUATE.format(values={metric: value}) + declared
        folders.append(results(tmp_path, name, OUTPUTS["two"], {"boxes": 8}, more))
    code, found, _ = difference(*folders, capsys)
    assert (code, found["worse"]) == ((1, [metric]) if is_worse else (0, []))
    assert found["unknown"] == []


def test_a_metric_of_which_nothing_says_which_way_is_good_is_said(
    tmp_path: Path, results: Callable[..., str], capsys: Capture
) -> None:
    folders = []
    for name, value in (("first", 1.0), ("second", 2.0)):
        more = EVALUATE.format(values={"ripple": value, "cosine": value})
        folders.append(results(tmp_path, name, OUTPUTS["two"], {"boxes": 8}, more))
    code, found, said = difference(*folders, capsys)
    assert (code, found["worse"], found["unknown"]) == (0, [], ["cosine", "ripple"])
    assert 'known whether less or more is better: "cosine", "ripple"' in said
    assert 'LOWER_IS_BETTER = {"cosine"}' in said
    assert run_command(["diff", *folders]) == 0
    shown = capsys.readouterr().out
    assert "ripple 1 → 2, not judged: it is not known whether less or more is better" in shown
