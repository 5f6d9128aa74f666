"""Of equal values, of which there are many among codes, test mode and all files pick the
first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs import ROOT
from torch import Tensor, nn

import quantizer


class Selecting(nn.Module):
    """Picks the best and the worst of 400 places, as detectors do, and goes on with their
    features.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features, self.scores, self.head = (
            nn.Linear(8, 8),
            nn.Linear(8, 1),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        features = self.features(x)
        scores = self.scores(features).squeeze(2)
        chosen = []
        for largest in (True, False):
            values, places = torch.topk(scores, 50, dim=1, largest=largest)
            there = features.gather(1, places[..., None].expand(-1, -1, 8))
            chosen.append((self.head(there), values, places))
        return chosen


@pytest.mark.slow
def test_test_mode_and_files_pick_the_first(tmp_path: Path) -> None:
    """The float network has ties, too: of each place there are two, so its trace must pick as
    the model is seen to.
    """
    torch.manual_seed(0)
    model, x = Selecting().eval(), torch.randn(4, 400, 8)
    x[:, 200:] = x[:, :200]
    result = quantizer.calibrate(model, str(ROOT / "configs" / "cpu_int8.json"), [(x,)])
    with torch.no_grad():
        chosen = result.network(x)
    for _, values, places in chosen:
        are_equal = values.diff() == 0
        assert int(are_equal.sum()) > 100
        assert bool((places.diff()[are_equal] > 0).all())
    pytest.importorskip("onnxruntime", reason="--to onnx needs quantizer-torch[onnx]")
    for target in ("onnx", "pt2", "pt2_float"):
        assert result.export(target, tmp_path / f"net.{target}").equal == 1
