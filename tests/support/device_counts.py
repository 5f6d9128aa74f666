"""How often a calibration waits for its device, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer.api.config import read_config
from quantizer.calibration import observing, steps
from quantizer.calibration.events import Events
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import Target
from quantizer.results.graph_file import trace_module
from quantizer.sources.batches import Batch
from quantizer.sources.data import load_batches
from support.strict_device import STRICT, Transfer, recorded
from support.toys import Residual, shake

BATCHES = 3


def convolutional() -> tuple[nn.Module, list[Tensor]]:
    """A network whose first activations are sampled, as they have many values."""
    torch.manual_seed(0)
    return shake(Residual()), [torch.randn(2, 3, 64, 64) for _ in range(BATCHES)]


class Attention(nn.Module):
    """An attention of two heads over the normalized input, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        scores = torch.softmax(query @ key.transpose(2, 3) / 8**0.5, dim=-1)
        mixed = (scores @ value).transpose(1, 2).flatten(2)
        return x + self.proj(mixed)


def attention() -> tuple[nn.Module, list[Tensor]]:
    """A small attention."""
    torch.manual_seed(0)
    return Attention().eval(), [torch.randn(2, 6, 16) for _ in range(BATCHES)]


NETWORKS = {"convolutional": convolutional, "attention": attention}


def waits_of_batches(network: str, config: dict[str, Any]) -> list[list[Transfer]]:
    """Return what the CPU waits for in each batch of the pass that observes a network."""
    module, data = NETWORKS[network]()
    module = module.to(STRICT)
    batches = load_batches(lambda: data, module=module)
    graph = trace_module(module, batches.first().to(STRICT))
    request = CalibrationRequest(
        target=Target(graph),
        config=read_config(config).require(),
        batches=batches,
        events=Events(),
    )
    marks: list[int] = []
    observe_batches = observing.observe_batches
    with recorded() as transfers, pytest.MonkeyPatch.context() as patches:

        def marked(batches: Iterable[Batch]) -> Iterator[Batch]:
            """Note how many transfers there were before each batch, and after the last."""
            iterator = iter(batches)
            while True:
                marks.append(len(transfers))
                batch = next(iterator, None)
                if batch is None:
                    return
                yield batch

        patches.setattr(
            observing,
            "observe_batches",
            lambda calibration, model, batches: observe_batches(
                calibration, model, marked(batches)
            ),
        )
        steps.run_calibration(request)
    ends = pairwise(marks)
    return [transfers[start:end] for start, end in ends]
