"""Small networks calibrated for the DPU, one per thing that its integers can get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.algorithms.dpu_alignment.dpu_alignment import align_positions
from quantizer.calibration import observing
from quantizer.calibration.joins import join_decisions
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import Solution
from quantizer.config.load import default_config
from quantizer.config.model import Settings
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.joining import joins
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch


class Applied(nn.Module):
    """A convolution, and a function of what it makes and of the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], **options: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, **options)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x), x)


class Transposed(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 8, 3, bias=False), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


class Joined(nn.Module):
    """One part of the concatenation has other readers, one has not; their ranges differ by a
    factor of 40.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.c = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x) * 40
        return self.c(torch.cat([a, b], 1)) + a


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv2d": lambda: Applied(lambda y, x: y),
    "depthwise": lambda: Applied(lambda y, x: y, groups=4),
    "dilated": lambda: Applied(lambda y, x: F.relu(y), dilation=2, stride=2),
    "transposed": Transposed,
    "depthwise transposed": lambda: Transposed(4),
    "linear and mean": Head,
    "relu6": lambda: Applied(lambda y, x: F.relu6(y * 4)),
    "hardtanh": lambda: Applied(lambda y, x: F.hardtanh(y * 4, 0.0, 6.0)),
    "leaky relu": lambda: Applied(lambda y, x: F.leaky_relu(y, 0.1)),
    "hardsigmoid": lambda: Applied(lambda y, x: F.hardsigmoid(y * 3) * y),
    "hardswish": lambda: Applied(lambda y, x: F.hardswish(y * 3)),
    "add": lambda: Applied(lambda y, x: F.relu(y * 10 + torch.cat([x, x], 1))),
    "sub": lambda: Applied(lambda y, x: y - 0.375 - torch.cat([x, x], 1)),
    "mul": lambda: Applied(lambda y, x: y * torch.cat([x, x], 1) * 0.75),
    "average": lambda: Applied(lambda y, x: F.avg_pool2d(y, 3, 2, 1)),
    "adaptive average": lambda: Applied(lambda y, x: F.adaptive_avg_pool2d(y, (3, 2))),
    "maximum": lambda: Applied(lambda y, x: F.max_pool2d(F.relu(y), 2)),
    "concat": Joined,
    "resize": lambda: Applied(lambda y, x: F.interpolate(y, scale_factor=2.0) * 1.5),
    "moves": lambda: Applied(
        lambda y, x: F.pixel_shuffle(F.pad(y, (1, 1, 1, 1)), 2).flatten(1)[:, 3:] * 1.5
    ),
    "chunks": lambda: Applied(lambda y, x: y.chunk(2, 1)[0] + y.chunk(2, 1)[1]),
}


def example(seed: int = 0, size: int = 6) -> Tensor:
    return torch.randn(8, 4, size, size, generator=torch.Generator().manual_seed(seed))


def planned(module: nn.Module, x: Tensor | None = None, **settings: bool) -> Plan:
    """The plan of the documented default for the DPU, without corrections."""
    config = default_config()
    wanted = {"include_cle": False, "include_bias_corr": False, **settings}
    config = dataclasses.replace(
        config, settings=dataclasses.replace(config.settings, **wanted)
    )
    original = trace(module.eval(), (example() if x is None else x,))
    return resolve_plan(config, run_passes(original, config.settings), original)


@cache
def solved(name: str) -> tuple[Graph, Solution]:
    """A network of the table, calibrated on one batch and aligned."""
    torch.manual_seed(0)
    return calibrated(planned(NETWORKS[name]()))


def with_decided_joins(calibration: Calibration) -> Calibration:
    """The calibration with the joins of its plan decided; no parts are scaled."""
    plan = joins.with_decisions(calibration.plan, join_decisions(calibration))
    return dataclasses.replace(calibration, plan=plan)


def calibrated(plan: Plan, dtype: torch.dtype = torch.float32) -> tuple[Graph, Solution]:
    """A planned network, calibrated on the example and aligned."""
    network = Network(plan.graph)
    calibration = observing.create_observers(plan)
    with torch.no_grad():
        observing.observe_batches(calibration, network, batches(0, dtype=dtype))
    found, _ = align_positions(
        observing.observed_solution(with_decided_joins(calibration)),
        plan.graph,
        Settings(target_device="DPU"),
    )
    return plan.graph, found


def batches(*seeds: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """The example of each seed as a batch."""
    return [Batch((example(seed).to(dtype),), {}, None, None) for seed in seeds]
