"""The choice of a layer's integer weights as least squares over sampled inputs. States the problem, solves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

DAMPING = 1.0  # of the inputs' mean square: calibration photos are few and alike, new ones lie in other directions


@dataclass(frozen=True)
class RoundingProblem:
    """Find integers c in [low, high] and scales s that bring inputs @ (c s)^T near to the targets, group by group.

    Each output channel is a row of `weight` and independent of the others, apart from scales they share. The error is
    that of AdaRound before its relaxation (Nagel et al. 2020, equation 13), with inputs as the quantized network sees
    them and targets as the float network makes them, plus `DAMPING` times the distance from the float weights.

    Attributes:
        weight: float weights [groups, rows, depth], float32, as are all but `unit`.
        nearest: integers of round-to-nearest minus the zero point, same shape.
        inputs: [groups, samples, depth], quantized.
        targets: [groups, samples, rows], without the bias.
        scale: [units], the scales there are.
        zero_point: [units].
        unit: which of them each row has, int64 [groups, rows].
        quant_min, quant_max: the least and the greatest code.
        power_of_two: whether scales must stay powers of two.
    """

    weight: Tensor
    nearest: Tensor
    inputs: Tensor
    targets: Tensor
    scale: Tensor
    zero_point: Tensor
    unit: Tensor
    quant_min: int
    quant_max: int
    power_of_two: bool = False

    @cached_property
    def hessian(self) -> Tensor:
        """Mean of x x^T over the samples, and the damping on its diagonal: [groups, depth, depth]."""
        gram = self.inputs.mT @ self.inputs / self.inputs.shape[1]
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += (DAMPING * diagonal.mean(1, keepdim=True)).clamp(min=1e-12)
        return gram

    @cached_property
    def pull(self) -> Tensor:
        """Mean of y x^T, and the damping's pull to the float weights: [groups, rows, depth]."""
        gram = (self.inputs.square().mean((1, 2)) * DAMPING).clamp(min=1e-12)
        return self.targets.mT @ self.inputs / self.inputs.shape[1] + gram[:, None, None] * self.weight

    def steps(self, scale: Tensor) -> Tensor:
        """The scale of each row: [groups, rows, 1]."""
        return scale[self.unit][..., None]

    def bounds(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The two integers next to each weight, as far as they are codes."""
        zero_point = self.steps(self.zero_point)
        exact = (self.weight / self.steps(scale)).clamp(self.quant_min - zero_point, self.quant_max - zero_point)
        return exact.floor(), exact.ceil()

    def errors(self, integers: Tensor, scale: Tensor) -> Tensor:
        """The damped error of each row, up to a constant: [groups, rows]."""
        values = integers * self.steps(scale)
        return (values * (values @ self.hessian - 2 * self.pull)).sum(2)

    def per_unit(self, values: Tensor) -> Tensor:
        """Sums of [groups, rows] over the rows that share a scale: [units]."""
        return values.new_zeros(len(self.scale)).index_add(0, self.unit.flatten(), values.flatten())
