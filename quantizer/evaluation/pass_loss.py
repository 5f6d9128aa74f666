"""Measures what passes that change the float function cost, apart from what quantization
costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.output_comparison import OutputComparison, Recorder
from quantizer.comparison.output_figures import OutputFigures, leaves, pooled, worst
from quantizer.errors import DataError, ModelError
from quantizer.graph.output_parts import Output, parts_named_as
from quantizer.nn.network import Network
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch

LEAST_DB = -999.0
"""The SQNR of outputs that are not finite or have other shapes."""
SAME_DB = 100.0
"""The SQNR from which on a difference is that of float arithmetic, and the function is the
same.
"""
FIGURES = ("passes_db", "quantization_db", "together_db")
"""The names of the figures in files."""


@dataclass(frozen=True)
class WorstOutput:
    """The SQNR, in dB, of the output or part that a change costs most; infinite where there is
    no difference.

    `name` is that of the output or part, where there are several and one can be told.
    """

    db: float
    name: str | None = None

    def to_json(self) -> float | None:
        """Return the figure as JSON can hold it: null where there is no difference."""
        return None if self.db == math.inf else max(LEAST_DB, self.db)


@dataclass(frozen=True)
class PassLoss:
    """What passes and quantization cost on one batch, each by the output or part that loses
    most.

    Args:
        names: the passes that have changed the function.
        passes: of the float network after all passes against the user's model.
        quantization: of the quantized network against that float network.
        together: of the quantized network against the user's model.
        by_output: the SQNR of each output and part of `passes`, in dB; of an output with parts,
            its best one.
    """

    names: tuple[str, ...]
    passes: WorstOutput
    quantization: WorstOutput
    together: WorstOutput
    by_output: Mapping[str, float]

    @property
    def line(self) -> str:
        """Return all three figures as a sentence."""
        return sentence(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return what report.json and run.json say, infinite figures as null."""
        figures = dict(
            zip(FIGURES, (self.passes, self.quantization, self.together), strict=True)
        )
        content: dict[str, Any] = {"names": list(self.names)}
        for key, figure in figures.items():
            content[key] = figure.to_json()
        content["outputs"] = {key: figure.name for key, figure in figures.items()}
        return content


def sentence(figures: Mapping[str, Any]) -> str:
    """Return a sentence on figures as report.json has them.

    >>> figures = {
    ...     "names": ["a_pass"],
    ...     "passes_db": 25.31,
    ...     "quantization_db": 38.7,
    ...     "together_db": 25.1,
    ... }
    >>> sentence(figures)
    'passes: 25.3 dB, quantization: 38.7 dB, together 25.1 dB on one batch (a_pass)'
    >>> outputs = {"passes_db": "a", "quantization_db": "b", "together_db": "a"}
    >>> sentence(figures | {"outputs": outputs})
    'passes: 25.3 dB (a), quantization: 38.7 dB (b), together 25.1 dB (a) on one batch (a_pass)'
    """
    outputs = figures.get("outputs", {})
    words: list[str] = []
    for key in FIGURES:
        output = outputs.get(key)
        ratio = _in_words(figures[key])
        words.append(ratio if output is None else f"{ratio} ({output})")
    passes, quantization, together = words
    names = ", ".join(figures["names"])
    ratios = f"passes: {passes}, quantization: {quantization}, together {together}"
    return f"{ratios} on one batch ({names})"


def pass_loss(calibrated: Calibrated, quantized: Network, batch: Batch) -> PassLoss | None:
    """Return what passes cost, or None if none changes the function of this model on the batch.

    Args:
        calibrated: the model, and what passes have made of it.
        quantized: its quantized network.
        batch: one batch of data, on the networks' device.
    """
    graph = calibrated.float_as_run
    if not graph.deviations:
        return None
    user_outputs = parts_named_as(calibrated.original, calibrated.original)
    passed_outputs = parts_named_as(graph, calibrated.original)
    watched = [*user_outputs, *passed_outputs]
    user = _Run(Network(calibrated.original), batch, watched)
    passed = _Run(Network(graph), batch, watched)
    rounded = _Run(quantized, batch, watched)
    of_passes = _compared(user_outputs, user, passed)
    worst_of_passes = _worst(of_passes)
    if worst_of_passes.db >= SAME_DB:
        return None
    return PassLoss(
        graph.deviations,
        passes=worst_of_passes,
        quantization=_worst(_compared(passed_outputs, passed, rounded)),
        together=_worst(_compared(user_outputs, user, rounded)),
        by_output=_by_output(of_passes, user_outputs),
    )


class _Run:
    """What a network returns for a batch, and what tells the parts of it apart."""

    def __init__(self, network: Network, batch: Batch, watched: Sequence[Output]) -> None:
        self.recorder = Recorder(watched)
        with torch.no_grad():
            execution = network.start(batch.args, batch.kwargs).advance(
                watch=self.recorder.watchers
            )
        self.outputs: list[Tensor] = execution.outputs()


def _compared(
    outputs: Sequence[Output], reference: _Run, other: _Run
) -> list[OutputFigures] | None:
    """Return the figures of outputs; None if they cannot be compared, as they are not finite or
    have other shapes.
    """
    comparison = OutputComparison(outputs)
    try:
        return comparison.figures(
            reference.outputs, other.outputs, reference.recorder, other.recorder
        )
    except (DataError, ModelError):
        return None


def _worst(figures: Sequence[OutputFigures] | None) -> WorstOutput:
    """Return the output or part with the lowest SQNR; of those that are one value in float,
    what they lose together.
    """
    if figures is None:
        return WorstOutput(LEAST_DB)
    lowest = worst(figures)
    if lowest is None or lowest.sqnr_db is None:
        return WorstOutput(pooled(figures).sqnr_db)
    is_only = len(list(leaves(figures))) == 1
    name = None if is_only or lowest.sqnr_db == math.inf else lowest.name
    return WorstOutput(lowest.sqnr_db, name)


def _by_output(
    figures: Sequence[OutputFigures] | None, outputs: Sequence[Output]
) -> dict[str, float]:
    """Return the SQNR of each output and part; of an output with parts, the highest of
    these.
    """
    if figures is None:
        names = [output.name for output in outputs]
        for output in outputs:
            names += [part.name for part in output.parts]
        return dict.fromkeys(names, LEAST_DB)
    ratios: dict[str, float] = {}
    for measured in figures:
        highest = -math.inf
        for part in measured.leaves:
            ratio = math.inf if part.sqnr_db is None else part.sqnr_db
            ratios[part.name] = ratio
            highest = max(highest, ratio)
        ratios[measured.whole.name] = highest
    return ratios


def _in_words(ratio: float | None) -> str:
    return "no loss" if ratio is None else f"{ratio:.1f} dB"
