"""Finds the sizes of inputs that a trace with open sizes accepts, or what fixes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from quantizer.config.run_options import AXES
from quantizer.errors import ModelError
from quantizer.graph.tracing.lengths import Length, axes_of_symbols, open_lengths, upper_bound
from quantizer.graph.tracing.size_guards import Guard, GuardedTrace

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_Place = tuple[int, int]
"""The index of a leaf of the call, and one of its axes."""
_BEYOND = 64
"""Sizes are tried one by one up to twice the traced one and this."""
_FAR = (3, 4, 16)
"""These multiples of the traced size are tried, too."""
_CHANGES = ((2, 0), (2, 32), (1, -1), (1, 1))
"""Factors of the traced size and what is added, those first that most networks take."""
_WITHOUT = "leave <--dynamic> out"
_HALF = 2
"""A range with an end is worth a dynamic size if it has half of the traced size, or twice."""


@dataclass(frozen=True)
class SizedTrace:
    """A trace in which sizes were left open.

    Args:
        module: the model.
        guarded: the guards of the trace.
        axes: the axes that were asked for, by leaf.
        shapes: of the leaves of the example.
    """

    module: nn.Module
    guarded: GuardedTrace
    axes: Sequence[Sequence[int]]
    shapes: Sequence[Sequence[int]]

    @property
    def places(self) -> list[_Place]:
        """Return all sizes that were asked for."""
        places: list[_Place] = []
        for leaf, axes in enumerate(self.axes):
            places += [(leaf, axis) for axis in axes]
        return places

    def lengths(self, program: ExportedProgram) -> tuple[Length, ...]:
        """Return the lengths that the program leaves open, after a check of the asked ones.

        Raises:
            ModelError: the model fixes one of these.
        """
        places = self.places
        sizes: dict[Any, list[_Place]] = {}
        for symbol, axes in axes_of_symbols(program).items():
            if set(axes).intersection(places):
                sizes[symbol] = axes
        lengths: list[Length] = []
        refused: list[_Place] = []
        for symbol, axes in sizes.items():
            length = self._length(axes, upper_bound(program.range_constraints[symbol]))
            if length is None:
                refused += axes
            else:
                lengths.append(length)
        # A model that refuses each size alone may take them if they are equal
        if len({self._traced(place) for place in refused}) == 1:
            together = self._length(refused, None)
            if together is not None:
                lengths.append(together)
        for length in lengths:
            places = [place for place in places if place not in length.axes]
        if places:
            raise self.fixed(places)
        lengths = _with_names(lengths)
        self._require_together(lengths)
        of_texts = open_lengths(program)
        for symbol in sizes:
            of_texts.pop(symbol, None)
        return (*lengths, *of_texts.values())

    def _length(self, axes: Sequence[_Place], limit: int | None) -> Length | None:
        """Return the sizes that the trace accepts in these places, None for the traced one."""
        traced = self._traced(axes[0])
        end = 2 * traced + _BEYOND
        accepted: set[int] = set()
        far = [traced * factor for factor in _FAR]
        for size in (*range(1, end), *far):
            if self._accepts(dict.fromkeys(axes, size)):
                accepted.add(size)
        bounded: Length | None = None
        for step in range(1, traced + 1):
            least = traced
            while least - step in accepted:
                least -= step
            most = traced
            while most + step in accepted:
                most += step
            length = Length(self._name(axes[0]), tuple(axes), traced, least, limit, step)
            is_unbounded = most + step >= end
            for size in far:
                is_unbounded &= size not in length or size in accepted
            if is_unbounded:
                return length
            is_wide = least * _HALF <= traced or traced * _HALF <= most
            if bounded is None and is_wide:
                bounded = replace(length, most=most)
        return bounded

    def _require_together(self, lengths: Sequence[Length]) -> None:
        """Raise `ModelError` if the trace accepts each size alone, but not several together."""
        chosen: list[Callable[[Length], int]] = [
            lambda length: length.least,
            lambda length: length.nearest(length.traced + length.step),
        ]
        for choose in chosen:
            sizes: dict[_Place, int] = {}
            for length in lengths:
                sizes.update(dict.fromkeys(length.axes, choose(length)))
            if not self._accepts(sizes):
                raise self.fixed(list(sizes))

    def _accepts(self, sizes: Mapping[_Place, int]) -> bool:
        """Return whether all guards hold for inputs of these sizes and batches of two kinds."""
        failing = [self._failing(sizes, more_samples) for more_samples in (0, 1)]
        return failing == [None, None]

    def _failing(self, sizes: Mapping[_Place, int], more_samples: int) -> Guard | None:
        """Return the first guard that does not hold for inputs of these sizes."""
        values: dict[str, int] = {}
        for place, symbol in self.guarded.symbols.items():
            values[symbol] = sizes.get(place, self._traced(place))
            if place[1] == 0:
                values[symbol] += more_samples
        return self.guarded.first_failing(values)

    def _traced(self, place: _Place) -> int:
        leaf, axis = place
        return self.shapes[leaf][axis]

    def _name(self, place: _Place) -> str:
        """Return what the size in a place is called."""
        leaf, axis = place
        names = {axes: name for name, axes in AXES.items()}
        return names[len(self.shapes[leaf]), axis]

    def fixed(self, places: Sequence[_Place]) -> ModelError:
        """Return the error that the model fixes the sizes in these places, with the layer that
        does.
        """
        model = type(self.module).__name__
        names = dict.fromkeys(self._name(place) for place in places)
        sizes = dict.fromkeys(self._traced(place) for place in places)
        what = f"{model} fixes its {' and '.join(names)} at {' x '.join(map(str, sizes))}"
        if 1 in sizes:
            return ModelError(
                f"{what}: torch takes a size of 1 for a constant",
                help="give a first batch with larger inputs",
            )
        guard = self._guard_of(places)
        if guard is None:
            return ModelError(what, help=_WITHOUT)
        cause, remedy = self._cause(guard)
        if guard.place:
            cause += f",{guard.place}"
        return ModelError(f"{what}: {cause}", help=f"{remedy}, or {_WITHOUT}")

    def failed(self, error: ModelError) -> ModelError:
        """Return the error of a trace that failed, and name the layer if a guard does."""
        guard = self._guard_of(self.places)
        if guard is None or guard.layer is None:
            return error
        return self.fixed(self.places)

    def _guard_of(self, places: Sequence[_Place]) -> Guard | None:
        """Return the guard that fixes sizes, the first one that fails at other sizes."""
        for factor, more in _CHANGES:
            sizes = {place: self._traced(place) * factor + more for place in places}
            for more_samples in (0, 1):
                guard = self._failing(sizes, more_samples)
                if guard is not None:
                    return guard
        return None

    def _cause(self, guard: Guard) -> tuple[str, str]:
        """Return what fixes a size, and how to leave it open."""
        if guard.layer is None:
            return "torch adds a condition after the call", "compute sizes from x.shape"
        layer = self.module.get_submodule(guard.layer)
        name = self.guarded.layer_name(guard)
        if isinstance(layer, nn.Linear):
            return (
                f"{name} takes {layer.in_features} values, as many as a map of that size has",
                "pool the map to a constant size before, as with nn.AdaptiveAvgPool2d(1)",
            )
        return f"{name} computes with the size as a constant", "compute sizes from x.shape"

    def remarks(self, lengths: Sequence[Length]) -> list[str]:
        """Return a sentence for each length that is accepted in steps, with the layer that asks
        for them.
        """
        remarks: list[str] = []
        for length in lengths:
            if length.step == 1:
                continue
            sizes = dict.fromkeys(length.axes, length.traced + 1)
            guard = self._failing(sizes, 0)
            if guard is not None:
                name = self.guarded.layer_name(guard)
                remarks.append(f"{length.name} is {length}, because of {name}{guard.place}")
        return remarks


def _with_names(lengths: Sequence[Length]) -> list[Length]:
    """Return lengths with different names: a second height is "height_1"."""
    counts: Counter[str] = Counter()
    named: list[Length] = []
    for length in lengths:
        count = counts[length.name]
        counts[length.name] += 1
        if count:
            length = replace(length, name=f"{length.name}_{count}")
        named.append(length)
    return named
