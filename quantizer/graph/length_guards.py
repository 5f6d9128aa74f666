"""Stops a trace with dynamic lengths early if it would hold for a few lengths only.

Models that read a text in chunks divide its length. Their traces hold for one number of chunks,
and take many times as long with a dynamic length as with a fixed one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from quantizer.config.wording import listed
from quantizer.graph.size_guards import Guard, GuardedTrace

_BEYOND = 64
"""Lengths are tried from half the traced length to twice the traced length plus this number."""
_FAR = (3, 4, 16, 4096)
"""These multiples of the traced length are tried, too."""


class FewLengthsError(Exception):
    """Stops a trace that would hold for a few lengths only."""


class LengthTrace(GuardedTrace):
    """Records the guards of a trace with dynamic lengths, and stops it at the first one that a
    length does not meet. Bounds of a length do not stop it, because torch keeps them.

    Args:
        module: what is traced.
        shapes: of the leaves of the example.
        stops_if_fixed: whether a fixed length is a reason to stop, too.

    Attributes:
        remark: a sentence on the guard that has stopped the trace, empty without.
    """

    def __init__(
        self, module: nn.Module, shapes: Sequence[Sequence[int]], stops_if_fixed: bool = False
    ) -> None:
        super().__init__(module)
        self.remark = ""
        self._shapes = shapes
        self._stops_if_fixed = stops_if_fixed

    def add(self, guard: Any) -> None:
        """Add a guard of torch.

        Raises:
            FewLengthsError: a length does not meet it.
        """
        count = len(self.guards)
        super().add(guard)
        for new in self.guards[count:]:
            if self._is_met_by_few(new):
                # A second trace, of a shorter example, does not decide what users read
                if not self._stops_if_fixed:
                    self.remark = self._sentence(new)
                raise FewLengthsError

    def _is_met_by_few(self, guard: Guard) -> bool:
        """Return whether a guard is false for one of the lengths that are tried."""
        is_fixed = self._stops_if_fixed and guard.constant > 0
        if not guard.divides and not is_fixed:
            return False
        tried = self._tried_sizes(guard)
        return not all(guard.holds(sizes) for sizes in tried)

    def _tried_sizes(self, guard: Guard) -> Iterator[dict[str, int]]:
        """Yield sizes by torch's symbol: those of the trace, except one length of the guard."""
        traced: dict[str, int] = {}
        for (leaf, axis), symbol in self.symbols.items():
            traced[symbol] = self._shapes[leaf][axis]
        for symbol, length in self._traced_lengths(guard).items():
            end = 2 * length + _BEYOND
            far = [length * factor for factor in _FAR]
            least = max(2, length // 2)
            near = range(least, end)
            for tried_length in (*near, *far):
                yield {**traced, symbol: tried_length}

    def _traced_lengths(self, guard: Guard) -> dict[str, int]:
        """Return what the lengths in a guard were in the trace, by torch's symbol."""
        lengths: dict[str, int] = {}
        for (leaf, axis), symbol in self.symbols.items():
            if axis and symbol in guard.symbols:
                lengths[symbol] = self._shapes[leaf][axis]
        return lengths

    def _sentence(self, guard: Guard) -> str:
        """Return a sentence on the guard that stops the trace."""
        name = "forward()"
        if guard.layer:
            layer = self._module.get_submodule(guard.layer)
            name = f"{guard.layer} ({type(layer).__name__})"
        model = type(self._module).__name__
        sizes = dict.fromkeys(self._traced_lengths(guard).values())
        return (
            f"{model} fixes its length at {listed(sizes)}: {name} computes with parts of a "
            f"text{guard.place}; give batches of this length"
        )
