"""How often a static calibration waits for its device: once a batch, whatever it observes.

See `strict_device`, which counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configs import document
from support.device_counts import BATCHES, NETWORKS, waits_of_batches
from support.strict_device import COPY, STRICT, UPLOAD, recorded, tensor
from torch import nn

from quantizer.api.config import read_config
from quantizer.calibration import observing
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.observers import Observer
from quantizer.observers.device_batch import DeviceBatch
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch
from quantizer.tables import RANGE_METHODS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _python_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", tensor)


def settings(method: str) -> dict[str, Any]:
    """The words of a method, and what it needs."""
    if RANGE_METHODS[method].powers_of_two_only:
        return {"method": method, "scale_type": "poweroftwo"}
    return {"method": method}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", RANGE_METHODS)
def test_each_batch_is_copied_once(method: str, network: str) -> None:
    """With the means of outputs. Its input goes to the device, and nothing else waits."""
    config = document(overall=settings(method), include_bias_corr=True)
    batches = waits_of_batches(network, config)
    assert len(batches) == BATCHES
    for waits in batches:
        assert sorted(wait.kind for wait in waits) == [COPY, UPLOAD], waits


ROWS = [
    {"qscheme": "per_channel", "ch_axis": 1},
    {"qscheme": "per_token", "ch_axis": 1},
    {"qscheme": "per_group", "ch_axis": 1, "group_size": 8},
]


def specs() -> list[QuantizationSpec]:
    """Each method with each statistic, of a tensor and of rows."""
    found = []
    for method, row in RANGE_METHODS.items():
        scale_type = "poweroftwo" if row.powers_of_two_only else "float"
        for cut in ({}, *ROWS):
            for statistic in ("max", "pooled"):
                if row.reads == "values" and statistic == "pooled":
                    continue
                found.append(
                    QuantizationSpec(
                        method=method, scale_type=scale_type, statistic=statistic, **cut
                    )
                )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec", specs(), ids=lambda spec: f"{spec.method}-{spec.qscheme}-{spec.statistic}"
)
def test_observers_find_the_same_in_one_copy(
    spec: QuantizationSpec, dtype: torch.dtype
) -> None:
    """As on the CPU, where they look at once."""
    draw = torch.Generator().manual_seed(0)
    shape = (3, 8, 50, 25) if spec.has_one_scale else (3, 8, 5)
    batches = [torch.randn(shape, generator=draw).to(dtype) * n for n in (1, 5, 2)]
    distribution = observing.DISTRIBUTION
    wanted, companion = Observer(spec), Observer(distribution)
    for x in batches:
        wanted.observe(x, companion)
    ours, ours_too = Observer(spec), Observer(distribution)
    for x in batches:
        given = x.to(STRICT)
        with recorded() as waits:
            batch = DeviceBatch()
            batch.observe(ours, given, ours_too)
            batch.finish()
        assert [wait.kind for wait in waits] == [COPY]
    for found, expected in ((ours, wanted), (ours_too, companion)):
        state, other = found.state_dict(), expected.state_dict()
        assert state.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in state.items())
    assert torch.equal(ours.qparams().scale, wanted.qparams().scale)


class Roots(nn.Module):
    """What is negative has no root, what is large no finite exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.exp(torch.sqrt(x)))


def failed(device: torch.device, bad: float, **words: Any) -> tuple[str, dict[str, Any]]:
    """Return the error about batches of which the second has this value, and the statistics."""
    torch.manual_seed(0)
    first = torch.rand(2, 4)
    second = first.clone()
    second[1, 2] = bad
    batches = [Batch.of(x.to(device)) for x in (first, second)]
    original = trace(Roots().eval().to(device), batches[0].args)
    config = read_config(document(include_bias_corr=True, **words)).require()
    plan = resolve_plan(config, run_passes(original, config.settings), original)
    calibration = observing.create_observers(plan)
    with torch.no_grad(), pytest.raises(DataError) as caught:
        observing.observe_batches(calibration, Network(plan.graph), batches)
    return str(caught.value), calibration.state_dict()


UNSIGNED = {"tensor": {"activation": {"signed": False}}}


@pytest.mark.parametrize(
    ("bad", "words", "text"),
    [
        (-1.0, {}, "batch 1: activation of Roots::Roots/exp: 1 NaN and 0 infinite among 8"),
        (1e30, {}, "batch 1: activation of Roots::Roots/exp: 0 NaN and 1 infinite among 8"),
        (1.0, UNSIGNED, "batch 0: activation of Roots::Roots/Linear[fc]/linear: The smallest"),
    ],
    ids=["nan", "infinity", "negative"],
)
def test_errors_say_the_same_and_leave_no_trace(
    bad: float, words: dict[str, Any], text: str
) -> None:
    """The device is asked only at the end of a batch."""
    message, state = failed(torch.device("cpu"), bad, **words)
    assert text in message
    ours, our_state = failed(STRICT, bad, **words)
    assert ours == message
    assert our_state.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in our_state.items())
