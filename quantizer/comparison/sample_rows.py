"""Finds which values of an output belong to which sample of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.numerics.metrics import row_energies, sqnr_db
from quantizer.sources.batches import Batch

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
