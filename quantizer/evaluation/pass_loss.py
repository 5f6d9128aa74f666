"""Measures the loss by passes that change the float function, separately from the loss by
quantization.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.output_comparison import OutputComparison, Recorder
from quantizer.comparison.output_figures import OutputFigures, leaves, pooled_noise, worst
from quantizer.comparison.samples import LOW_DB
from quantizer.errors import DataError, ModelError
from quantizer.graph.channels.output_parts import Output, parts_named_as
from quantizer.nn.network import Network
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch

_NOT_COMPARABLE_DB = -999.0
"""The SQNR of outputs that are not finite or have other shapes."""
_SAME_DB = 100.0
"""From this SQNR on, differences are those of rounding floats, and the function is the same."""
_FIGURES = ("passes_db", "quantization_db", "together_db")
"""The names of the figures in files."""


@dataclass(frozen=True)
class WorstOutput:
    """The output or part with the lowest SQNR after a change.

    Attributes:
        db: its SQNR; infinite if there is no difference.
        name: its name; None if there is only one output, or no difference.
    """

    db: float
    name: str | None = None

    def to_json(self) -> float | None:
        """Return the SQNR for JSON: null if there is no difference."""
        if self.db == math.inf:
            return None
        return max(_NOT_COMPARABLE_DB, self.db)


@dataclass(frozen=True)
class PassLoss:
    """The loss by passes and by quantization on one batch.

    Attributes:
        names: the passes that have changed the function.
        passes: the worst output of the float network after all passes, against the user's
            model.
        quantization: the worst output of the quantized network against that float network.
        together: the worst output of the quantized network against the user's model.
        by_output: the SQNR in dB of each output and part of `passes`; for an output with parts,
            that of its best part.
    """

    names: tuple[str, ...]
    passes: WorstOutput
    quantization: WorstOutput
    together: WorstOutput
    by_output: Mapping[str, float]

    @property
    def line(self) -> str:
        """Return the three figures in one line."""
        return pass_loss_line(self.to_json())

    @property
    def lost(self) -> frozenset[str]:
        """Return the outputs and parts that passes alone leave below LOW_DB."""
        ratios = self.by_output.items()
        return frozenset(name for name, ratio in ratios if ratio < LOW_DB)

    @property
    def remark(self) -> str:
        """Return a sentence if passes alone leave an output below LOW_DB, else ""."""
        if self.passes.db >= LOW_DB:
            return ""
        output = "the model's output"
        if self.passes.name is not None:
            output += f" {self.passes.name}"
        return (
            f"before anything is quantized, {', '.join(self.names)} reduce {output} to "
            f"{self.passes.db:.1f} dB on one batch: switch them off, or train the model with "
            "the functions that they insert"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures for report.json and run.json, infinite ones as null."""
        content: dict[str, Any] = {"names": list(self.names)}
        outputs = {}
        figures = (self.passes, self.quantization, self.together)
        for key, figure in zip(_FIGURES, figures, strict=True):
            content[key] = figure.to_json()
            outputs[key] = figure.name
        content["outputs"] = outputs
        return content


def pass_loss_line(figures: Mapping[str, Any]) -> str:
    """Return one line about the figures of report.json.

    >>> figures = {
    ...     "names": ["a_pass"],
    ...     "passes_db": 25.31,
    ...     "quantization_db": 38.7,
    ...     "together_db": 25.1,
    ... }
    >>> pass_loss_line(figures)
    'passes: 25.3 dB, quantization: 38.7 dB, together 25.1 dB on one batch (a_pass)'
    >>> outputs = {"passes_db": "a", "quantization_db": "b", "together_db": "a"}
    >>> pass_loss_line(figures | {"outputs": outputs})
    'passes: 25.3 dB (a), quantization: 38.7 dB (b), together 25.1 dB (a) on one batch (a_pass)'
    """
    outputs = figures.get("outputs", {})
    words: list[str] = []
    for key in _FIGURES:
        output = outputs.get(key)
        ratio = _sqnr_text(figures[key])
        if output is not None:
            ratio += f" ({output})"
        words.append(ratio)
    passes, quantization, together = words
    names = ", ".join(figures["names"])
    ratios = f"passes: {passes}, quantization: {quantization}, together {together}"
    return f"{ratios} on one batch ({names})"


def pass_loss(calibrated: Calibrated, quantized: Network, batch: Batch) -> PassLoss | None:
    """Return the loss by passes; None if they do not change the function on the batch.

    Args:
        calibrated: the model with its graph after passes that may change its function.
        quantized: its quantized network.
        batch: one batch of data, on the networks' device.
    """
    graph = calibrated.float_as_run
    user_outputs = parts_named_as(calibrated.original, calibrated.original)
    passed_outputs = parts_named_as(graph, calibrated.original)
    watched = [*user_outputs, *passed_outputs]
    user_run = _Run(Network(calibrated.original), batch, watched)
    passed_run = _Run(Network(graph), batch, watched)
    quantized_run = _Run(quantized, batch, watched)
    passes_figures = _compare_runs(user_outputs, user_run, passed_run)
    worst_of_passes = _worst_output(passes_figures)
    if worst_of_passes.db >= _SAME_DB:
        return None
    quantization_figures = _compare_runs(passed_outputs, passed_run, quantized_run)
    together_figures = _compare_runs(user_outputs, user_run, quantized_run)
    return PassLoss(
        graph.deviations,
        passes=worst_of_passes,
        quantization=_worst_output(quantization_figures),
        together=_worst_output(together_figures),
        by_output=_by_output(passes_figures, user_outputs),
    )


class _Run:
    """The outputs of a network for a batch, and the values that locate their parts."""

    def __init__(self, network: Network, batch: Batch, watched: Sequence[Output]) -> None:
        self.recorder = Recorder(watched)
        with torch.no_grad():
            execution = network.start(batch.args, batch.kwargs).advance(
                watch=self.recorder.watchers
            )
        self.outputs: list[Tensor] = execution.outputs()


def _compare_runs(
    outputs: Sequence[Output], reference: _Run, other: _Run
) -> list[OutputFigures] | None:
    """Return the figures of outputs; None if they are not finite or have other shapes."""
    comparison = OutputComparison(outputs)
    try:
        return comparison.figures(
            reference.outputs, other.outputs, reference.recorder, other.recorder
        )
    except (DataError, ModelError):
        return None


def _worst_output(figures: Sequence[OutputFigures] | None) -> WorstOutput:
    """Return the output or part with the lowest SQNR.

    Constant outputs have no SQNR of their own. If all are constant, return that of all
    together.
    """
    if figures is None:
        return WorstOutput(_NOT_COMPARABLE_DB)
    lowest = worst(figures)
    if lowest is None or lowest.sqnr_db is None:
        return WorstOutput(pooled_noise(figures).sqnr_db)
    is_only = len(list(leaves(figures))) == 1
    if is_only or lowest.sqnr_db == math.inf:
        return WorstOutput(lowest.sqnr_db)
    return WorstOutput(lowest.sqnr_db, lowest.name)


def _by_output(
    figures: Sequence[OutputFigures] | None, outputs: Sequence[Output]
) -> dict[str, float]:
    """Return the SQNR of each output and part. An output with parts has that of its best
    part.
    """
    if figures is None:
        names = [output.name for output in outputs]
        for output in outputs:
            names += [part.name for part in output.parts]
        return dict.fromkeys(names, _NOT_COMPARABLE_DB)
    ratios: dict[str, float] = {}
    for measured in figures:
        highest = -math.inf
        for part in measured.leaves:
            ratio = part.sqnr_db
            if ratio is None:
                ratio = math.inf
            ratios[part.name] = ratio
            highest = max(highest, ratio)
        ratios[measured.whole.name] = highest
    return ratios


def _sqnr_text(ratio: float | None) -> str:
    """Return an SQNR with its unit, or "no loss"."""
    return "no loss" if ratio is None else f"{ratio:.1f} dB"
