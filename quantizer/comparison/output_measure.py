"""One number for what a change does to a network's outputs, in which each output and each
part counts alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_comparison import OutputComparison, Recorder
from quantizer.comparison.output_figures import NOT_FINITE
from quantizer.errors import DataError
from quantizer.graph.output_parts import Output
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch


class OutputMeasure:
    """Adds up the energies of parts, each multiplied so that on the first batch all have the
    same.

    With a single part it is that part's energy. What is constant, or no float, does not count.

    Args:
        outputs: of the network that others are compared with.
        only: the name of the one part that counts; None for all.
    """

    def __init__(self, outputs: Sequence[Output], only: str | None = None) -> None:
        self._comparison, self._only = OutputComparison(outputs), only
        self._recorder = Recorder(outputs)
        self._expected: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        self._signals: dict[str, float] = {}
        self._noises: dict[str, float] = {}

    def of(self, outputs: Sequence[Output]) -> OutputMeasure:
        """Return the same measure of another network, which has these outputs by the same
        names.
        """
        return OutputMeasure(outputs, self._only)

    def expect(self, execution: Execution) -> float:
        """Run the network that others are compared with on a batch; return the energy of its
        outputs.

        Raises:
            DataError: an output is not finite.
        """
        self._recorder = Recorder(self._comparison.outputs)
        outputs = execution.advance(watch=self._recorder.watchers).outputs()
        self._expected = self._parts(outputs)
        signals = {name: energy(part) for name, part in self._expected.items()}
        if not math.isfinite(math.fsum(signals.values())):
            raise DataError(NOT_FINITE, help="check the data and the weights")
        if not self._weights:
            self._weights = _weights(signals)
        for name, signal in signals.items():
            self._signals[name] = self._signals.get(name, 0.0) + signal
        return self._weighted(signals)

    def noise(self, execution: Execution, *, is_counted: bool = False) -> float:
        """Run another network on that batch to its end; return the energy of the difference,
        infinite for NaN.

        Args:
            is_counted: whether it counts for `sqnr_db`.
        """
        changed = self._parts(execution.advance().outputs())
        noises = {name: energy(part - changed[name]) for name, part in self._expected.items()}
        if is_counted:
            for name, noise in noises.items():
                self._noises[name] = self._noises.get(name, 0.0) + noise
        total = self._weighted(noises)
        return total if math.isfinite(total) else math.inf

    @property
    def sqnr_db(self) -> float:
        """The lowest of all parts, of the network that was counted."""
        ratios = [decibel(self._signals[name], noise) for name, noise in self._noises.items()]
        return min(ratios, default=math.inf)

    def _weighted(self, energies: Mapping[str, float]) -> float:
        """Return the sum of the energies of all parts, each times its weight."""
        return math.fsum(self._weights.get(name, 0.0) * part for name, part in energies.items())

    def _parts(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the values of each part that counts."""
        parts: dict[str, Tensor] = {}
        for output, value in zip(self._comparison.outputs, outputs, strict=True):
            if value.is_floating_point() and value.numel():
                pieces = self._comparison.pieces(output, value, self._recorder)
                parts |= {part.name: piece for part, piece in pieces if not part.is_constant}
        if self._only is None:
            return parts
        return {name: part for name, part in parts.items() if name == self._only}


def _weights(signals: dict[str, float]) -> dict[str, float]:
    """Return what the energy of each part is multiplied by; what is zero has no weight."""
    present = {name: signal for name, signal in signals.items() if signal > 0}
    if len(present) == 1:
        return dict.fromkeys(present, 1.0)
    total = math.fsum(present.values())
    return {name: total / signal / len(present) for name, signal in present.items()}


class OutputNoises:
    """The noise of each floating-point output, and of each of its parts that lie one after the
    other.

    Args:
        outputs: of the network, as its graph names them.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._floats = [output for output in outputs if output.is_float]
        self.noises: dict[str, Noise] = {}

    def add(self, targets: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Take in the floating-point outputs of one batch."""
        if len(targets) != len(self._floats):
            self._floats = []
        for number, (x, y) in enumerate(zip(targets, found, strict=True)):
            if not self._floats:
                self._noise(str(number)).add(x, y)
                continue
            output = self._floats[number]
            pairs = zip(_pieces(output, x), _pieces(output, y), strict=True)
            for (name, mine), (_, its) in pairs:
                self._noise(name).add(mine, its)

    def _noise(self, name: str) -> Noise:
        return self.noises.setdefault(name, Noise())

    @property
    def error(self) -> float:
        """The errors of all, each weighted so that all count alike."""
        weights = _weights({name: noise.signal for name, noise in self.noises.items()})
        return math.fsum(
            weights.get(name, 1.0) * noise.error for name, noise in self.noises.items()
        )

    @property
    def worst(self) -> str:
        """The lowest SQNR as text, with the name of the output or part if there are several."""
        if not self.noises:
            return f"{math.inf:.2f}"
        name = min(self.noises, key=lambda each: self.noises[each].sqnr_db)
        ratio = f"{self.noises[name].sqnr_db:.2f}"
        return ratio if len(self.noises) == 1 else f"{ratio} ({name})"


class AlikeOutputs:
    """Gives the floating-point outputs of a run, with the parts of each scaled so that all
    have the same energy.

    The factors are those of one batch. Parts that are no ranges of one axis share the factor of
    their output, and an output that is the only one is given as it is.
    """

    def __init__(self, outputs: Sequence[Output], network: Network, batch: Batch) -> None:
        leaves = [part for output in outputs for part in output.parts]
        self._factors: list[Tensor | None] = [None] * len(outputs)
        if len(leaves) < 2:
            return
        values = network.start(batch.args, batch.kwargs).advance().outputs()
        energies: dict[str, float] = {}
        for output, value in zip(outputs, values, strict=True):
            if value.is_floating_point():
                for name, piece in _pieces(output, value):
                    energies[name] = energy(piece)
        weights = _weights(energies)
        for number, (output, value) in enumerate(zip(outputs, values, strict=True)):
            if value.is_floating_point():
                self._factors[number] = _factor(output, value, weights)

    def __call__(self, execution: Execution) -> list[Tensor]:
        """Return the outputs of an execution that has ended."""
        scaled: list[Tensor] = []
        outputs = execution.outputs()
        for number, value in enumerate(outputs):
            factor = self._factors[number] if len(self._factors) == len(outputs) else None
            if value.is_floating_point():
                scaled.append(value if factor is None else value * factor)
        return scaled


def _axis_of_parts(output: Output) -> int | None:
    """Return the axis along which all parts of an output lie one after the other; None if
    there is none."""
    axes = {None if part.place is None else part.place.axis for part in output.parts}
    return axes.pop() if len(axes) == 1 else None


def _pieces(output: Output, value: Tensor) -> list[tuple[str, Tensor]]:
    """Return the parts of an output that have a factor of their own, by name."""
    axis = _axis_of_parts(output)
    if axis is None:
        return [(output.name, value)]
    pieces: list[tuple[str, Tensor]] = []
    for part in output.parts:
        if part.place is not None and not part.is_constant:
            length = part.place.stop - part.place.start
            pieces.append((part.name, value.narrow(axis, part.place.start, length)))
    return pieces


def _factor(output: Output, value: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Return what an output is multiplied by, so that its energy has these weights."""
    axis = _axis_of_parts(output)
    if axis is None:
        return value.new_full((), math.sqrt(weights.get(output.name, 0.0)))
    factors = value.new_zeros(value.shape[axis])
    for part in output.parts:
        if part.place is not None:
            factors[part.place.start : part.place.stop] = math.sqrt(weights.get(part.name, 0.0))
    view = [1] * value.dim()
    view[axis] = len(factors)
    return factors.view(view)
