"""Calibrates with bias correction in memory, and measures what is left of the mean shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from quantizer.algorithms.bias_correction.bias_correction import (
    correct_layer_biases,
    output_steps,
)
from quantizer.calibration import observing
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.calibration.statistics import ChannelMean
from quantizer.config.model import ResolvedConfig
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch


@dataclass(frozen=True)
class Corrected:
    """A calibrated network before and after bias correction, and the batches it saw."""

    calibration: Calibration
    before: Solution
    batches: Sequence[Batch]
    budget: int | None = None
    sure: bool = True

    @property
    def graph(self) -> Graph:
        return self.calibration.plan.graph

    @cached_property
    def runner(self) -> SequentialRunner:
        """What runs the batches; all of them if it need not be sure."""
        return SequentialRunner(
            quantized_network(self.graph, self.before),
            self.batches,
            ActivationStore(self.budget),
            first=4 if self.sure else None,
        )

    @cached_property
    def after(self) -> Solution:
        steps = output_steps(self.calibration.plan, self.before)
        as_codes = self.calibration.plan.settings.target_device == "DPU"
        means = self.calibration.means
        found = correct_layer_biases(self.runner, means, steps, as_codes=as_codes)
        return replace(self.before, corrections=found)

    def shifts(self, solution: Solution) -> dict[str, torch.Tensor]:
        """Each layer's mean output minus that of the float network, [channels], of a network in
        test mode.

        Only for networks whose activations are float: with quantizers, outputs cannot be seen
        before them.
        """
        means = {
            name: ChannelMean(target.ch_axis) for name, target in self.calibration.means.items()
        }
        network = quantized_network(self.graph, solution)
        with torch.no_grad():
            for batch in self.batches:
                network.observe(
                    batch.args,
                    batch.kwargs,
                    {name: mean.observe for name, mean in means.items()},
                )
        return {
            name: mean.mean() - self.calibration.means[name].mean()
            for name, mean in means.items()
        }

    def mean_shift(self, solution: Solution) -> float:
        """Its absolute mean over all channels of all layers."""
        return float(torch.cat(list(self.shifts(solution).values())).abs().mean())


def corrected(original: Graph, config: ResolvedConfig, batches: Sequence[Batch]) -> Corrected:
    """Calibrate a traced model; the correction itself runs when it is asked for."""
    graph = run_passes(original, config.settings)
    network = Network(graph)
    calibration = observing.create_observers(resolve_plan(config, graph, original))
    with torch.no_grad():
        observing.observe_batches(calibration, network, batches)
    return Corrected(calibration, observing.observed_solution(calibration), batches)
