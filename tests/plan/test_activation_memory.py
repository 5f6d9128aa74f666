"""How much memory the values of one pass take at the same time, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantizer.graph.tracing.trace import trace
from quantizer.plan.size import peak_activation_bytes


class Residual(nn.Module):
    """The input is read again at the end, so it stays."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 100), nn.Linear(100, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize(
    ("module", "values"),
    [
        # Before and after the ReLU
        (nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 2)), 100 + 100),
        # A view takes none of its own
        (nn.Sequential(nn.Linear(4, 100), nn.Flatten(), nn.Linear(100, 2)), 4 + 100),
        (
            nn.Sequential(nn.Linear(4, 100), nn.Flatten(), nn.ReLU(), nn.Linear(100, 2)),
            100 + 100,
        ),  # its base stays, too
        (nn.Sequential(nn.ZeroPad1d(3), nn.Linear(10, 2)), 4 + 10),  # a padded value is no view
        (Residual(), 4 + 100 + 100),
    ],
)
def test_values_are_freed_after_their_last_reader(module: nn.Module, values: int) -> None:
    graph = trace(module, (torch.zeros(2, 4),))
    assert peak_activation_bytes(graph, 8) == 8 * values * 4
