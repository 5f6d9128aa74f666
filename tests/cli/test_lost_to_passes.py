"""What passes and quantization cost is the figure of the output that loses most, with its
name.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import calibrate, check
from torch import Tensor, nn

import quantizer

CONFIG = json.loads((Path(__file__).parents[2] / "configs" / "cpu_int8.json").read_text())
CONFIG |= {"convert_relu6_to_relu": True}
MODEL = """
import sys
sys.path.insert(0, {folder!r})
from test_lost_to_passes import Detector, data


def model():
    return Detector({how!r}).eval()


def calibration_data():
    return data()
"""


class Detector(nn.Module):
    """Boxes in pixels, and small scores that converting a ReLU6 to a ReLU changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.boxes, self.scores, self.how = nn.Conv1d(3, 4, 1), nn.Conv1d(3, 3, 1), how
        self.activation = nn.ReLU6()

    def forward(self, x: Tensor) -> Any:
        boxes = self.boxes(x) * 6400
        scores = self.activation(self.scores(x) * 20)
        if self.how == "joined":
            return torch.cat([boxes, scores], 1)
        return {"boxes": boxes, "scores": scores}


def data() -> list[Tensor]:
    return [
        torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    ]


def ratio_db(exact: Tensor, found: Tensor) -> float:
    noise = (exact - found).double().square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))


@pytest.mark.parametrize(("how", "scores"), [("joined", "0.scores"), ("two", "scores")])
def test_a_pass_that_ruins_a_small_output_is_seen_beside_a_large_one(
    how: str, scores: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In terminal, run.json, report.json and report.html alike."""
    (tmp_path / "net.py").write_text(MODEL.format(folder=str(Path(__file__).parent), how=how))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    folder, model = tmp_path / "out", str(tmp_path / "net.py")
    assert calibrate(folder, model=model, config=str(tmp_path / "config.json")) == 0
    capsys.readouterr()
    assert check(folder, model=model) == 0
    shown = capsys.readouterr()
    passes = json.loads((folder / "report.json").read_text())["passes"]
    exact = Detector(how).eval()
    with torch.no_grad():
        batch = data()[0]
        before = exact.activation(exact.scores(batch) * 20)
        after = (exact.scores(batch) * 20).relu()
    assert passes["passes_db"] == pytest.approx(ratio_db(before, after), abs=1e-3)
    assert passes["passes_db"] < 5 > passes["together_db"]
    assert passes["quantization_db"] > 25
    assert passes["outputs"]["passes_db"] == passes["outputs"]["together_db"] == scores
    assert json.loads((folder / "run.json").read_text())["passes"] == passes
    line = (
        f"passes: {passes['passes_db']:.1f} dB ({scores}), quantization: "
        f"{passes['quantization_db']:.1f} dB ("
    )
    assert line in " ".join(shown.out.split())
    assert line in (folder / "report.html").read_text()
    assert f"reduce the model's output {scores} to" in " ".join(shown.err.split())


def test_names_of_outputs_are_text_in_a_notebook() -> None:
    class Marked(Detector):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return {"boxes": found["boxes"], "<b>scores": found["scores"]}

    tested = quantizer.calibrate(Marked("two").eval(), CONFIG, data()).test()
    assert "<b>scores" in tested.passes.line
    assert "&lt;b&gt;scores" in tested._repr_html_()
    assert "<b>" not in tested._repr_html_()


def test_what_quantization_costs_another_output_is_still_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pass has ruined one output, and quantization makes one value of another."""

    class Joined(Detector):
        def __init__(self) -> None:
            super().__init__("two")
            self.small = nn.Conv1d(3, 3, 1)

        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            large = torch.cat([found["boxes"], self.small(x).sigmoid()], 1)
            return {"large": large, "scores": found["scores"]}

    config = json.loads((Path(__file__).parents[2] / "configs" / "dpu.json").read_text())
    with caplog.at_level(logging.WARNING):
        tested = quantizer.calibrate(
            Joined().eval(), config | {"convert_relu6_to_relu": True}, data()
        ).test()
    assert tested.passes.passes.name == "scores"
    assert {warning["output"] for warning in tested.to_json()["warnings"]} == {"large.small"}
    assert "reduce the model's output scores to" in caplog.text
