"""A tag for every step of a sequence: a convolution and an LSTM between stubs, a head that
stays float.

quantizer --quant_mode calib --config_file configs/cpu_int8.json --model examples/tagger.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub


class Tagger(nn.Module):
    """What lies between the stubs is quantized. The weights are random: this is about what the
    tools show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Tags (batch, steps, 5) of features (batch, 8, steps)."""
        features = torch.relu(self.conv(self.quant(x)))
        states, _ = self.lstm(features.transpose(1, 2))
        tags: Tensor = self.head(self.dequant(states))
        return tags


def model() -> nn.Module:
    """The tagger, the same each time."""
    torch.manual_seed(0)
    return Tagger()


def calibration_data() -> list[Tensor]:
    """Four batches of eight random sequences."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 8, 20, generator=generator) for _ in range(4)]
