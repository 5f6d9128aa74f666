"""Every architecture that torch.export can trace calibrates, tests, and is written as code that
computes the same.
"""

from __future__ import annotations

from pathlib import Path

import attention  # noqa: F401
import dense  # noqa: F401 - each registers its architectures
import mobile  # noqa: F401
import plain  # noqa: F401
import pytest
import residual  # noqa: F401
import sequences  # noqa: F401
import torch
from harness import CASES, run, traced
from support.extended import extended_except

from quantizer.config.load import default_config, load_config

INT8 = load_config(Path(__file__).parents[2] / "configs" / "cpu_int8.json").require()
USUAL = "shufflenet_v2 yolo gru_with_attention vit"


@pytest.mark.slow
@pytest.mark.shows("38 architectures (random), from AlexNet to Swin", "test mode")
@pytest.mark.parametrize("name", extended_except(CASES, *USUAL.split()))
def test_architecture(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    graph = traced(case)
    for label, config, floor in zip(
        ("int8", "dpu"), (INT8, default_config()), case.floors, strict=True
    ):
        folder = tmp_path / label
        folder.mkdir()
        found = run(case, graph, config, folder)
        assert found.generated_equals, label
        assert found.sqnr >= floor, label
        assert set(found.unknown) == case.unknown


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 24
