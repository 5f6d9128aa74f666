"""A small model with the operator of the plug-in, and random data."""

import torch
from quantizer_example.operators import bend
from torch import Tensor, nn


class Bent(nn.Module):
    """Two layers with the operator between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return four numbers for each sample."""
        outputs: Tensor = self.second(bend(self.first(x)))
        return outputs


def model() -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    return Bent().eval()


def calibration_data() -> list[Tensor]:
    """Return four batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 8, generator=generator) for _ in range(4)]
