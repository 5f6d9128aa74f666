"""A quantized network of no use is told where the loss begins, and which tensor to leave in
float.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.configs import document
from torch import Tensor, nn

import quantizer

CONFIG = document(quantizable_data_type=["weights", "activation"])


class Outlier(nn.Module):
    """The second layer's first channel is ten thousand times as large as the others, and the
    third one ignores it.
    """

    def __init__(self, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        with torch.no_grad():
            self.second.bias[0] = size
            self.third.weight[:, 0] = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x).sigmoid()))
        return y


def compared(
    size: float, caplog: pytest.LogCaptureFixture, config: dict[str, Any] = CONFIG
) -> tuple[float, str]:
    data = [
        torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)
    ]
    with caplog.at_level(logging.WARNING):
        found = quantizer.calibrate(Outlier(size).eval(), config, data).test().to_json()
    return found["metrics"]["sqnr_db"], caplog.text


@pytest.mark.parametrize(
    "config", [CONFIG, document()], ids=["seven tensors", "more than are tried"]
)
def test_the_first_layer_and_the_best_change_are_named(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sqnr, said = compared(1e4, caplog, config)
    assert sqnr < 15
    assert (
        "The first tensor below that is the activation of "
        "Outlier::Outlier/Linear[second]/linear" in said
    )
    assert "the activation of Outlier::Outlier/Linear[second]/linear helps most" in said


def test_one_batch_is_read_again() -> None:
    read = list[int]()

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            for seed in range(3):
                read.append(seed)
                yield torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))

    found = quantizer.calibrate(Outlier(1e4).eval(), CONFIG, Loader())
    read.clear()
    found.test()
    assert read == [0, 1, 2, 0]


def test_nothing_is_said_of_a_good_one(caplog: pytest.LogCaptureFixture) -> None:
    sqnr, said = compared(1.0, caplog)
    assert sqnr > 25
    assert "SQNR" not in said
