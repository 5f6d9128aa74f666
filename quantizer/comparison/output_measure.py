"""One number for the effect of a change on a network's outputs, in which all outputs and parts
count alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_comparison import OutputComparison, Recorder
from quantizer.comparison.output_figures import NOT_FINITE
from quantizer.errors import DataError
from quantizer.graph.channels.output_parts import Output
from quantizer.nn.network import Execution, Network
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch


class OutputMeasure:
    """Sums the energies of parts, each with a weight such that all have the same energy on the
    first batch.

    With a single part it is that part's energy. Constant parts and parts of other dtypes than
    floating point do not count.

    Args:
        outputs: of the reference network.
        only: the name of the one part that counts; None for all.
    """

    def __init__(self, outputs: Sequence[Output], only: str | None = None) -> None:
        self._only = only
        self._comparison = OutputComparison(outputs)
        self._recorder = Recorder(outputs)
        self._expected: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        self._signals: defaultdict[str, float] = defaultdict(float)
        self._noises: defaultdict[str, float] = defaultdict(float)

    def of(self, outputs: Sequence[Output]) -> OutputMeasure:
        """Return the same measure of another network, whose outputs have the same names."""
        return OutputMeasure(outputs, self._only)

    def expect(self, execution: Execution) -> float:
        """Run the reference network on a batch; return the energy of its outputs.

        Raises:
            DataError: an output is not finite.
        """
        self._recorder = Recorder(self._comparison.outputs)
        execution = execution.advance(watch=self._recorder.watchers)
        self._expected = self._parts(execution.outputs())
        signals = {name: energy(part) for name, part in self._expected.items()}
        total = math.fsum(signals.values())
        if not math.isfinite(total):
            raise DataError(NOT_FINITE, help="check the data and the weights")
        if not self._weights:
            self._weights = _weights(signals)
        for name, signal in signals.items():
            self._signals[name] += signal
        return self._weighted(signals)

    def noise(self, execution: Execution, *, is_counted: bool = False) -> float:
        """Run another network on that batch; return the energy of the difference.

        Args:
            execution: of the network, which has begun.
            is_counted: whether the batch counts for `sqnr_db`.

        Returns:
            The energy; infinity for NaN.
        """
        parts = self._parts(execution.advance().outputs())
        noises = {}
        for name, expected in self._expected.items():
            noises[name] = energy(expected - parts[name])
            if is_counted:
                self._noises[name] += noises[name]
        total = self._weighted(noises)
        return total if math.isfinite(total) else math.inf

    @property
    def sqnr_db(self) -> float:
        """Return the lowest SQNR of a part, in dB, on the batches that count."""
        noises = self._noises.items()
        ratios = [decibel(self._signals[name], noise) for name, noise in noises]
        return min(ratios, default=math.inf)

    def _weighted(self, energies: Mapping[str, float]) -> float:
        """Return the sum of the energies of all parts, each times its weight."""
        weights = self._weights
        return math.fsum(weights.get(name, 0.0) * part for name, part in energies.items())

    def _parts(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the values of each part that counts."""
        parts = {}
        comparison = self._comparison
        for output, value in zip(comparison.outputs, outputs, strict=True):
            if not value.is_floating_point() or not value.numel():
                continue
            for part, piece in comparison.pieces(output, value, self._recorder):
                if self._only in (None, part.name) and not part.is_constant:
                    parts[part.name] = piece
        return parts


def _weights(signals: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each part's energy with which all parts have the mean energy.

    A part without energy has no factor. The factor of a single part is 1.
    """
    present = {name: signal for name, signal in signals.items() if signal > 0}
    if len(present) == 1:
        return dict.fromkeys(present, 1.0)
    total = math.fsum(present.values())
    return {name: total / signal / len(present) for name, signal in present.items()}


class OutputNoises:
    """Measures the noise of each floating-point output, and of each of its parts that are
    ranges of one axis.

    Args:
        outputs: of the network, as its graph names them.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._floats = [output for output in outputs if output.is_float]
        self.noises: dict[str, Noise] = {}

    def add(self, targets: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Add the floating-point outputs of one batch."""
        if len(targets) != len(self._floats):
            self._floats = []
        pairs = zip(targets, outputs, strict=True)
        for number, (x, y) in enumerate(pairs):
            targets_by_name = {str(number): x}
            outputs_by_name = {str(number): y}
            if self._floats:
                output = self._floats[number]
                targets_by_name = _pieces(output, x)
                outputs_by_name = _pieces(output, y)
            for name, target in targets_by_name.items():
                noise = self.noises.setdefault(name, Noise())
                noise.add(target, outputs_by_name[name])

    @property
    def error(self) -> float:
        """Return the sum of all errors, with weights such that all outputs and parts count
        alike.
        """
        signals = {name: noise.signal for name, noise in self.noises.items()}
        weights = _weights(signals)
        noises = self.noises.items()
        # An output that is all zero in the float network still counts
        return math.fsum(weights.get(name, 1.0) * noise.error for name, noise in noises)

    @property
    def worst(self) -> str:
        """Return the lowest SQNR as text, with the name of the output or part if there are
        several.
        """
        if not self.noises:
            return f"{math.inf:.2f}"
        ratios = {name: noise.sqnr_db for name, noise in self.noises.items()}
        name = min(ratios, key=ratios.__getitem__)
        text = f"{ratios[name]:.2f}"
        return text if len(ratios) == 1 else f"{text} ({name})"


class AlikeOutputs:
    """Returns the floating-point outputs of a run, scaled so that all parts have the same
    energy.

    The factors are those of one batch. Parts that are not ranges of one axis share the factor
    of their output.
    """

    def __init__(self, outputs: Sequence[Output], network: Network, batch: Batch) -> None:
        self._factors: list[Tensor | None] = [None] * len(outputs)
        values = network.start(batch.args, batch.kwargs).advance().outputs()
        energies = {}
        for output, value in zip(outputs, values, strict=True):
            if value.is_floating_point():
                for name, piece in _pieces(output, value).items():
                    energies[name] = energy(piece)
        weights = _weights(energies)
        for number, value in enumerate(values):
            if value.is_floating_point():
                self._factors[number] = _factor(outputs[number], value, weights)

    def __call__(self, execution: Execution) -> list[Tensor]:
        """Return the outputs of an execution that has ended."""
        scaled = []
        outputs = execution.outputs()
        has_factors = len(self._factors) == len(outputs)
        for number, value in enumerate(outputs):
            if not value.is_floating_point():
                continue
            factor = self._factors[number] if has_factors else None
            if factor is not None:
                value = value * factor
            scaled.append(value)
        return scaled


def _axis_of_parts(output: Output) -> int | None:
    """Return the axis of which all parts of an output are ranges; None if there is none."""
    axes = set()
    for part in output.parts:
        if part.place is None:
            return None
        axes.add(part.place.axis)
    return axes.pop() if len(axes) == 1 else None


def _pieces(output: Output, value: Tensor) -> dict[str, Tensor]:
    """Return the parts of an output that have a factor of their own, by name."""
    axis = _axis_of_parts(output)
    if axis is None:
        return {output.name: value}
    pieces = {}
    for part in output.parts:
        place = part.place
        if place is not None and not part.is_constant:
            length = place.stop - place.start
            pieces[part.name] = value.narrow(axis, place.start, length)
    return pieces


def _factor(output: Output, value: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Return the factor by which an output is multiplied, so that its energy has the weights.

    It is one number, or one for each index of the axis that the parts divide.
    """
    axis = _axis_of_parts(output)
    if axis is None:
        factor = math.sqrt(weights.get(output.name, 0.0))
        return value.new_full((), factor)
    factors = value.new_zeros(value.shape[axis])
    for part in output.parts:
        place = part.place
        if place is not None:
            factor = math.sqrt(weights.get(part.name, 0.0))
            factors[place.start : place.stop] = factor
    shape = [1] * value.dim()
    shape[axis] = len(factors)
    return factors.view(shape)
