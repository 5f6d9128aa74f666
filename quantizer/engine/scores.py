"""Test mode: the quantized network against the float one on the same batches, and the user's own metrics of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quantizer.engine import evaluate
from quantizer.engine.calibrated import Calibrated
from quantizer.engine.evaluate import Comparison
from quantizer.engine.events import Events, Stage
from quantizer.errors import ModelError
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.models import Evaluate
from quantizer.sources.user_code import user_errors


@dataclass(frozen=True)
class Scores:
    """What a test found: the comparison tensor by tensor, and `pairs`, each metric of both networks."""

    comparison: Comparison
    pairs: Mapping[str, Mapping[str, float]]
    network: Network

    @property
    def metrics(self) -> dict[str, float]:
        """By name; `<metric>_float` and `<metric>_drop` beside each of the user's."""
        found = self.comparison.metrics()
        for name, pair in self.pairs.items():
            found |= {
                f"{name}_float": pair["float"],
                name: pair["quantized"],
                f"{name}_drop": pair["float"] - pair["quantized"],
            }
            if name == "perplexity" and pair["float"]:  # it multiplies where other metrics lose
                found["perplexity_ratio"] = pair["quantized"] / pair["float"]
        return found


def score(
    calibrated: Calibrated, module: nn.Module, batches: Batches, events: Events, function: Evaluate | None = None
) -> Scores:
    """Run both networks on all batches.

    Args:
        module: the float model, for `function`.
        function: the user's `evaluate(model, data)`; without it, what targets allow is measured: top-1 or perplexity.

    Raises:
        DataError: no batch, or an output that is not finite.
    """
    device, quantized = calibrated.device, calibrated.network()
    on_device = partial(_on_device, batches, device)
    with Stage(events, "test", batches.total) as stage:
        float_network = Network(calibrated.float_graph)
        compared = evaluate.compare(float_network, quantized, on_device(), stage.advance)
    if function is None:
        return Scores(compared, compared.pairs(), quantized)
    before, after = (
        measure(model, batches, device, events, f"evaluate {label}", function)
        for model, label in ((module, "float"), (quantized, "quantized"))
    )
    pairs = {name: {"float": value, "quantized": after[name]} for name, value in before.items() if name in after}
    return Scores(compared, pairs, quantized)


def measure(
    model: Callable[..., Any],
    batches: Batches,
    device: torch.device,
    events: Events,
    label: str,
    function: Evaluate | None = None,
) -> dict[str, float]:
    """The metrics of one model: the user's, or without `function` what the targets allow."""
    with Stage(events, label, batches.total) as stage, torch.no_grad():
        counted = _counted(_on_device(batches, device), stage)
        if function is not None:
            return function(model, (batch.raw for batch in counted))
        with user_errors(f"running the {label} model", ModelError):
            return evaluate.measure(model, counted)


def _on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    return (batch.to(device) for batch in batches)


def _counted(batches: Iterator[Batch], stage: Stage) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        stage.advance()
