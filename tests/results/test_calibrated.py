"""What test mode holds of a model: the float network and the quantized one have in common what
they can.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import Settings
from quantizer.graph.tracing.trace import trace
from quantizer.results.calibrated import Calibrated


@pytest.mark.parametrize(("device", "shared"), [("CPU", True), ("DPU", False)])
def test_folded_weights_are_there_once_where_no_pass_is_for_the_device(
    device: str, shared: bool
) -> None:
    """A DPU has another network: of what its passes change the float one keeps its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish()).eval()
    calibrated = Calibrated(
        trace(model, (torch.randn(2, 3, 6, 6),)), Settings(target_device=device), Solution({})
    )
    conv = next(node.name for node in calibrated.graph.nodes if node.op == "conv2d")
    ours, floats = (
        graph.weight(graph.by_name[conv])
        for graph in (calibrated.graph, calibrated.float_graph)
    )
    assert torch.equal(ours, floats)
    assert (ours.data_ptr() == floats.data_ptr()) is shared
    assert not torch.equal(ours, model[0].weight)


def test_another_solution_leaves_the_weights_where_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    calibrated = Calibrated(trace(model, (torch.randn(2, 3, 6, 6),)), Settings(), Solution({}))
    solution = Solution({})
    other = calibrated.with_solution(solution)
    assert other.solution is solution
    assert other.graph_after_passes is calibrated.graph_after_passes
