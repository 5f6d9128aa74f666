"""One number for what a change does to a network's outputs, in which each output and each part counts alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from quantizer.engine.output_comparison import OutputComparison, Recorder
from quantizer.errors import DataError
from quantizer.graph.output_parts import Output
from quantizer.nn.execution import Execution
from quantizer.numerics.metrics import decibel, energy


class OutputMeasure:
    """Adds up the energies of parts, each multiplied so that on the first batch all have the same.

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

    def expect(self, execution: Execution) -> float:
        """Run the network that others are compared with on a batch; return the energy of its outputs.

        Raises:
            DataError: an output is not finite.
        """
        self._recorder = Recorder(self._comparison.outputs)
        outputs = execution.advance(watch=self._recorder.watchers).outputs()
        self._expected = self._parts(outputs)
        signals = {name: energy(part) for name, part in self._expected.items()}
        if not math.isfinite(math.fsum(signals.values())):
            raise DataError("the float model's output is not finite", help="check the data and the weights")
        if not self._weights:
            self._weights = _weights(signals)
        for name, signal in signals.items():
            self._signals[name] = self._signals.get(name, 0.0) + signal
        return math.fsum(self._weights.get(name, 0.0) * signal for name, signal in signals.items())

    def noise(self, execution: Execution, *, is_counted: bool = False) -> float:
        """Run another network on that batch to its end; return the energy of the difference, infinite for NaN.

        Args:
            is_counted: whether it counts for `sqnr_db`.
        """
        found = self._parts(execution.advance().outputs())
        noises = {name: energy(part - found[name]) for name, part in self._expected.items()}
        if is_counted:
            for name, noise in noises.items():
                self._noises[name] = self._noises.get(name, 0.0) + noise
        total = math.fsum(self._weights.get(name, 0.0) * noise for name, noise in noises.items())
        return total if math.isfinite(total) else math.inf

    @property
    def sqnr_db(self) -> float:
        """The lowest of all parts, of the network that was counted."""
        ratios = [decibel(self._signals[name], noise) for name, noise in self._noises.items()]
        return min(ratios, default=math.inf)

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
