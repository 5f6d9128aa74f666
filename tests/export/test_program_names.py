"""A .pt2 has the names of the user's model for its inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from support.configs import document
from torch import Tensor, nn

import quantizer


class Detections(NamedTuple):
    loc: Tensor
    conf: Tensor


class Detector(nn.Module):
    """Outputs in fields and keys, of which some are no names in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 4)

    def forward(self, image: Tensor) -> dict[str, Any]:
        x = self.features(image)
        return {
            "best": Detections(x.tanh(), x.sigmoid()),
            "aux heads": [x, x * 2],
            "class": x.exp(),
            "1": x - 1,
            "again": x,
        }


OUTPUTS = (
    "best_loc",
    "best_conf",
    "aux_heads_0",
    "aux_heads_1",
    "class_1",
    "output_1",
    "aux_heads_0",
)


@pytest.mark.parametrize("target", ["pt2", "pt2_float"])
def test_the_signature_of_a_program_has_keys_and_fields(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 4)
    result = quantizer.calibrate(Detector().eval(), document(), [images])
    path = tmp_path / "detector.pt2"
    result.export(target, path)
    program = torch.export.load(path)
    assert program.graph_signature.user_inputs == ("image",)
    assert program.graph_signature.user_outputs == OUTPUTS
    outputs = program.module()(images)
    assert list(outputs) == ["best", "aux heads", "class", "1", "again"]
    # The order of the signature is that of the tensors in the output
    leaves = torch.utils._pytree.tree_leaves(outputs)
    assert len(leaves) == len(OUTPUTS)
    torch.testing.assert_close(leaves[2], outputs["again"], rtol=0, atol=0)
