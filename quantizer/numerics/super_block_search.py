"""Searches the scales and minima of groups that are codes times factors of a super-block.

Two steps are done in turn. Each group tries the neighbours of its codes. Then the factors of a
super-block are fitted to all of its codes.
"""

from itertools import product

import torch
from torch import Tensor

from quantizer.numerics.superblocks import SuperBlockLayout, rounded_factor
from quantizer.numerics.weighted_groups import Scales, WeightedGroups

_ROUNDS = 2
"""How often codes and factors are changed in turn."""
_NEIGHBOURS: tuple[int, ...] = (-1, 0, 1)


class SuperBlockSearch:
    """Groups with the best codes and factors so far.

    All tensors are [groups, 1]. All groups of a super-block have its factor.

    Args:
        groups: whole super-blocks, one after the other.
        start: scales and minima of the groups, as if they could be any floats.
        layout: of the super-blocks.
    """

    def __init__(self, groups: WeightedGroups, start: Scales, layout: SuperBlockLayout) -> None:
        self.groups = groups
        self.layout = layout
        outermost = layout.scales.outermost[0]
        largest = self._outermost(start.scale)
        self.factor = self._repeated(rounded_factor(largest / outermost))
        self.codes = layout.scales.nearest(start.scale / self.factor)
        self.minimum_factor = torch.zeros_like(self.factor)
        self.minimum_codes = torch.zeros_like(self.codes)
        if layout.minima is not None:
            largest = self._outermost(start.minimum)
            factor = rounded_factor(largest / layout.minima.most)
            self.minimum_factor = self._repeated(factor)
            codes = start.minimum / self.minimum_factor
            self.minimum_codes = layout.minima.nearest(codes)
        self.error = groups.error(self.scale, self.minimum)

    @property
    def scale(self) -> Tensor:
        """Return the scales of groups."""
        return self.codes * self.factor

    @property
    def minimum(self) -> Tensor:
        """Return the minima of groups."""
        return self.minimum_codes * self.minimum_factor

    def searched(self) -> Scales:
        """Search, and return the scales and minima with the least error, and the error."""
        for _ in range(_ROUNDS):
            self._try_neighbours()
            self._fit_factors()
        self._try_neighbours()
        return Scales(self.scale, self.minimum, self.error)

    def _try_neighbours(self) -> None:
        """Take the best of the codes next to the present ones, for each group."""
        codes = self.codes
        minimum_codes = self.minimum_codes
        minimum_steps = _NEIGHBOURS
        if self.layout.minima is None:
            minimum_steps = (0,)
        for step, minimum_step in product(_NEIGHBOURS, minimum_steps):
            if step or minimum_step:
                self._try_codes(codes + step, minimum_codes + minimum_step)

    def _try_codes(self, codes: Tensor, minimum_codes: Tensor) -> None:
        """Take these codes for the groups whose error shrinks."""
        codes = self.layout.scales.nearest(codes)
        if self.layout.minima is not None:
            minimum_codes = self.layout.minima.nearest(minimum_codes)
        scale = codes * self.factor
        minimum = minimum_codes * self.minimum_factor
        error = self.groups.error(scale, minimum)
        is_better = error < self.error
        self.codes = codes.where(is_better, self.codes)
        self.minimum_codes = minimum_codes.where(is_better, self.minimum_codes)
        self.error = error.where(is_better, self.error)

    def _fit_factors(self) -> None:
        """Take the factors that fit all codes of a super-block best, if its error shrinks.

        With fixed codes, values are linear in the factors, so that least squares fits them.
        """
        steps = self.groups.codes(self.scale, self.minimum)
        steps *= self.codes
        offsets = None
        if self.layout.minima is not None:
            offsets = self.minimum_codes.expand_as(steps)
        fit = self.groups.least_squares(steps, offsets, self._summed)
        factor = self._repeated(rounded_factor(fit.factor))
        minimum_factor = self._repeated(rounded_factor(fit.offset))
        scale = self.codes * factor
        minimum = self.minimum_codes * minimum_factor
        error = self.groups.error(scale, minimum)
        is_better = self._summed(error) < self._summed(self.error)
        is_better = self._repeated(is_better)
        self.factor = factor.where(is_better, self.factor)
        self.minimum_factor = minimum_factor.where(is_better, self.minimum_factor)
        self.error = error.where(is_better, self.error)

    def _outermost(self, numbers: Tensor) -> Tensor:
        """Return the number with the largest magnitude of each super-block, [super-blocks,
        1].
        """
        by_block = numbers.view(-1, self.layout.groups)
        index = by_block.abs().argmax(1, keepdim=True)
        return by_block.gather(1, index)

    def _summed(self, numbers: Tensor) -> Tensor:
        """Return the sum over each super-block, [super-blocks, 1]."""
        values = self.layout.groups * numbers.shape[1]
        by_block = numbers.reshape(-1, values)
        return by_block.sum(1, keepdim=True)

    def _repeated(self, numbers: Tensor) -> Tensor:
        """Return numbers of super-blocks, repeated for each of their groups."""
        return numbers.repeat_interleave(self.layout.groups, 0)
