"""Measures the error of each sample of an output, so that loud samples do not hide that of the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.numerics.metrics import row_energies, sqnr_db
from quantizer.sources.batches import Batch

LOW_DB = 15.0
"""No network that was tried kept its accuracy below this output SQNR."""
BELOW_DB = 6.0
"""Samples with an SQNR that is so much lower than that of all values are worth a sentence."""
_WORST_SHARE = 20
"""One of so many samples counts as the worst; with fewer samples, one does."""
_SILENCE = 1e-9
"""A sample with less of the median energy is silent: no error of it is large or small."""
_MAX_NAMED = 4


@dataclass(frozen=True)
class SampleFigures:
    """The figures of the samples of an output or part.

    Attributes:
        count: how many samples have an SQNR.
        median_db: the SQNR of the median sample.
        worst_db: the highest SQNR of the worst twentieth of samples: all others have more. With
            fewer than twenty samples it is that of the worst one.
        worst: the sample with the lowest SQNR, by batch and sample.
        silent: how many samples are silent. They have no SQNR.
        first_silent: the first of them, by batch and sample.
    """

    count: int
    median_db: float
    worst_db: float
    worst: str
    silent: int
    first_silent: tuple[str, ...]

    def at_most(self, db: float) -> SampleFigures:
        """Return the figures with no SQNR above `db`."""
        median_db = min(self.median_db, db)
        worst_db = min(self.worst_db, db)
        return replace(self, median_db=median_db, worst_db=worst_db)


def sample_json(figures: SampleFigures | None) -> dict[str, Any]:
    """Return the figures as report.json has them, each None if there are none."""
    if figures is None:
        return {"sqnr_db_median": None, "sqnr_db_worst": None, "samples": None}
    samples = {
        "count": figures.count,
        "worst": figures.worst,
        "silent": figures.silent,
        "first_silent": list(figures.first_silent),
    }
    return {
        "sqnr_db_median": figures.median_db,
        "sqnr_db_worst": figures.worst_db,
        "samples": samples,
    }


@dataclass
class SampleNoise:
    """The energies of the samples of all batches.

    Args:
        batches: for each batch what `SampleRows.energies` returns.
        is_known: whether the samples of all batches are known.
    """

    batches: list[Tensor] = field(default_factory=list)
    is_known: bool = True

    def add(self, energies: Tensor | None) -> None:
        """Add the samples of one batch; None if they are not known."""
        if energies is None:
            self.is_known = False
        else:
            self.batches.append(energies)

    def merge(self, other: SampleNoise) -> None:
        """Add later batches."""
        self.batches += other.batches
        self.is_known &= other.is_known

    @property
    def figures(self) -> SampleFigures | None:
        """Return the figures; None if samples are not known, or all are silent."""
        if not self.is_known or not self.batches:
            return None
        signal, _, error = torch.cat(self.batches, 1)
        present = signal[signal > 0]
        if not len(present):
            return None
        ordered_energies = present.sort().values
        median = ordered_energies[len(present) // 2]
        is_silent = (signal == 0) | (signal < _SILENCE * median)
        ratios = 10 * torch.log10(signal / error)
        # As `decibel` has it
        ratios[ratios.isnan()] = -math.inf
        # Behind all others
        ratios[is_silent] = math.inf
        ordered = ratios.sort().values
        silent = is_silent.nonzero().flatten().tolist()
        count = len(signal) - len(silent)
        worst = max(1, count // _WORST_SHARE)
        names = map(self._name, silent[:_MAX_NAMED])
        return SampleFigures(
            count,
            median_db=float(ordered[(count - 1) // 2]),
            worst_db=float(ordered[worst - 1]),
            worst=self._name(int(ratios.argmin())),
            silent=len(silent),
            first_silent=tuple(names),
        )

    def _name(self, number: int) -> str:
        """Return batch and sample of a sample, both counted from 0."""
        batch = 0
        while number >= self.batches[batch].shape[1]:
            number -= self.batches[batch].shape[1]
            batch += 1
        return sample_name(batch, number)


def sample_name(batch: int, sample: int) -> str:
    """Return how messages call a sample.

    >>> sample_name(2, 3)
    'batch 2, sample 3'
    """
    return f"batch {batch}, sample {sample}"


def worst_words(count: int) -> str:
    """Return which of so many samples count as the worst.

    >>> worst_words(40), worst_words(8)
    ('the worst twentieth of 40 samples', 'the worst of 8 samples')
    """
    share = " twentieth" if count >= _WORST_SHARE else ""
    return f"the worst{share} of {count} samples"


def together(parts: Iterable[SampleNoise]) -> SampleNoise:
    """Return the samples of one batch of an output that has these parts. Parts without energies
    are constant.
    """
    total = SampleNoise()
    for part in parts:
        if not part.is_known:
            return SampleNoise(is_known=False)
        if not part.batches:
            continue
        if total.batches:
            total.batches = [total.batches[0] + part.batches[0]]
        else:
            total.batches = part.batches[:1]
    return total


_FIRST = 2
"""So many samples are run alone."""
_SAME_DB = 40.0
"""A batch of another size is computed with other sums."""


@dataclass(frozen=True)
class SampleRows:
    """Where the samples are in a tensor.

    Args:
        count: how many samples the batch has.
        axis: along which one sample follows the other.
        numbers: [rows] the sample of each index of `axis`, int64 on the CPU; None if all
            samples have the same number of indices, in the order of the samples.
    """

    count: int
    axis: int = 0
    numbers: Tensor | None = None

    def energies(self, x: Tensor, y: Tensor) -> Tensor:
        """Return |x|^2, |y|^2 and |x - y|^2 of each sample, float64 [3, samples] on the CPU.

        Args:
            x: floating point, with the samples along `axis`.
            y: of the same shape.
        """
        if not x.numel():
            return torch.zeros(3, self.count, dtype=torch.float64)
        x = x.movedim(self.axis, 0)
        y = y.movedim(self.axis, 0)
        if self.numbers is None:
            rows = len(x) // self.count
            shape = (self.count, rows, *x.shape[1:])
            return row_energies(x.reshape(shape), y.reshape(shape))
        sums = []
        # On the CPU: a GPU adds up by index in any order
        for energies in row_energies(x, y):
            by_sample = torch.bincount(self.numbers, energies, self.count)
            sums.append(by_sample)
        return torch.stack(sums)

    def of_places(self, places: Tensor, shape: Sequence[int]) -> SampleRows:
        """Return where the samples are in a vector of some values of the tensor.

        Args:
            places: [values] the indices of the values in the flattened tensor.
            shape: of the tensor.
        """
        size = shape[self.axis]
        stride = 1
        for inner_size in shape[self.axis + 1 :]:
            stride *= inner_size
        indices = places.cpu() // stride % size
        numbers = indices // (size // self.count)
        per_sample = len(numbers) // self.count
        samples = torch.arange(self.count)
        if torch.equal(numbers, samples.repeat_interleave(per_sample)):
            return SampleRows(self.count)
        return SampleRows(self.count, numbers=numbers)

    def of_tokens(self, included: Tensor) -> SampleRows:
        """Return where the samples are in [1, tokens, ...], the tokens that a mask includes.

        Args:
            included: bool [samples, positions].
        """
        numbers = included.nonzero()[:, 0]
        return SampleRows(self.count, axis=1, numbers=numbers.cpu())


class SampleFinder:
    """Finds the samples in the outputs of a model.

    An output may have several rows for each sample along its axis of samples. A run of the
    first samples shows whether the rows of one sample follow each other.

    Args:
        run: returns the outputs of the float model for a batch.
    """

    def __init__(self, run: Callable[[Batch], Sequence[Tensor]]) -> None:
        self._run = run
        self._follows: dict[int, bool] = {}

    def rows(self, number: int, x: Tensor, axis: int | None, batch: Batch) -> SampleRows | None:
        """Return where the samples of an output are; None if that is not known.

        Args:
            number: of the output.
            x: its value for the batch.
            axis: whose size follows that of the batch; None if there is none.
            batch: of data.
        """
        count = batch.size
        if axis is None or axis >= x.dim() or not x.is_floating_point():
            return None
        size = x.shape[axis]
        if not size or size % count:
            return None
        if size > count > 1:
            if number not in self._follows:
                first = min(_FIRST, count - 1)
                rows = x.narrow(axis, 0, first * (size // count))
                self._follows[number] = self._gives(number, batch.first(first), rows)
            if not self._follows[number]:
                return None
        return SampleRows(count, axis)

    def _gives(self, number: int, batch: Batch, expected: Tensor) -> bool:
        """Return whether an output has these values for a batch."""
        try:
            outputs = self._run(batch)
        except (RuntimeError, ValueError, TypeError, IndexError, QuantizerError):
            # Some models take batches of one size
            return False
        if number >= len(outputs) or outputs[number].shape != expected.shape:
            return False
        return sqnr_db(expected, outputs[number]) >= _SAME_DB
