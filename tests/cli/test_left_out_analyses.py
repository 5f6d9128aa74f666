"""An analysis that only improves a figure or a choice ends no run: what it finds is left out, and
run.log says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantizer.cli.main import run_command

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        joined = torch.cat([self.a(x), self.b(x)], 1).sigmoid() * 3
        return joined, self.head(joined).sort(1).values

def model():
    torch.manual_seed(0)
    return Net()

def calibration_data():
    return [torch.rand(4, 4) for _ in range(4)]
"""
ANALYSES = {
    "quantizer.graph.channels.origins.computed_parts": "the parts of values that are computed from joined",
    "quantizer.graph.channels.joined_parts.joined_parts": "the parts, rows and channels of",
    "quantizer.graph.channels.row_order.row_order": "the parts, rows and channels of",
    "quantizer.plan.fit.fitted_config.give_divided_heads_channels": "the step",
}


@pytest.mark.parametrize("analysis", ANALYSES)
def test_an_analysis_that_fails_ends_no_run(
    analysis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a shape was unexpected")

    (tmp_path / "net.py").write_text(NET)
    if analysis.endswith("give_divided_heads_channels"):
        fail.__name__ = "fail"
        monkeypatch.setattr("quantizer.plan.fit.fitted_config._STEPS", (fail,))
        monkeypatch.setattr("quantizer.plan.fit.fitted_config._IMPROVEMENTS", (fail,))
    else:
        monkeypatch.setattr(analysis, fail)
    out = tmp_path / "out"
    assert run_command(["run", str(tmp_path / "net.py"), "--to", "pt2", "-o", str(out)]) == 0
    lines = (out / "run.log").read_text().splitlines()
    line = next(line for line in lines if "left out after an internal error" in line)
    assert line.startswith(ANALYSES[analysis])
    assert "(RuntimeError: a shape was unexpected, line" in line
    assert json.loads((out / "report.json").read_text())


def test_part_numbers_follow_no_operand_that_only_lends_its_type(tmp_path: Path) -> None:
    """As the router of Gemma 3n has it."""
    text = NET.replace("self.head(joined)", "self.head(joined).tanh().type_as(joined)")
    (tmp_path / "net.py").write_text(text)
    out = tmp_path / "out"
    assert run_command(["run", str(tmp_path / "net.py"), "--to", "pt2", "-o", str(out)]) == 0
    assert "left out after an internal error" not in (out / "run.log").read_text()
