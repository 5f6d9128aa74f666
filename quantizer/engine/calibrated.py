"""A calibrated network beside the float one: fresh from the pipeline, or from a result folder. What test mode runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from quantizer.config.model import Settings
from quantizer.engine import results
from quantizer.engine.attach import quantized_network
from quantizer.engine.inputs import call_of_shapes, check_sizes, input_shapes
from quantizer.engine.results import QuantInfo
from quantizer.engine.solution import Solution
from quantizer.errors import DataError, ModelError
from quantizer.graph.edits import inserted, with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.trace import trace
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch
from quantizer.sources.models import materialize, try_first_batch


@dataclass(frozen=True)
class Calibrated:
    """`original` is the model as traced; `settings` and `solution` are what calibration ran with and found."""

    original: Graph
    settings: Settings
    solution: Solution

    @cached_property
    def graph(self) -> Graph:
        """The graph that was planned, with the layers that algorithms inserted."""
        return inserted(run_passes(self.original, self.settings), self.solution.insertions)

    @cached_property
    def float_graph(self) -> Graph:
        """The float graph that `graph` is compared with, node by node: rescaled as that is."""
        graph = inserted(run_passes(self.original, self.settings, device=False), self.solution.insertions)
        return with_weights(graph, self.solution.rescaled)

    def network(self) -> Network:
        """The quantized network, a new one."""
        return quantized_network(self.graph, self.solution).to(self.original.device)


def traced(module: nn.Module, batch: Batch) -> Graph:
    """The module's graph; layers that wait for a first input get their shapes.

    Raises:
        ModelError: it cannot be traced.
        DataError: it cannot run on the batch at all.
    """
    materialize(module, batch)
    try:
        return trace(module, batch.args, batch.kwargs)
    except ModelError:
        try_first_batch(module, batch)
        raise


def reopened(module: nn.Module, batch: Batch, original: Graph, info: QuantInfo) -> Calibrated:
    """The calibration of `info` for a model that `original` is a trace of, on `batch`.

    Its inputs may have other sizes than those calibrated with, if these change nothing but sizes.

    Raises:
        ResultError: the model is not the calibrated one; the first layer or tensor that differs is named.
    """
    shapes = info.header["inputs"]
    call = call_of_shapes(batch.args, batch.kwargs, shapes) if shapes != input_shapes(original) else None
    if call is None:
        results.check_model(info, original)
        return Calibrated(original, info.settings, info.solution)
    try:
        calibrated = traced(module, replace(batch, args=call[0], kwargs=call[1]))
    except (ModelError, DataError):
        results.check_model(info, original)  # this model cannot have been calibrated with them
        raise
    results.check_model(info, calibrated)
    check_sizes(calibrated, original, info.solution)
    return Calibrated(original, info.settings, info.solution)
