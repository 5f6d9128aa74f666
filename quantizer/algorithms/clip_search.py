"""Ranges of weights cut where the layer's outputs gain by it. Rounds nothing for good.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", 2023, and its authors' code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.column_scales import group_size
from quantizer.algorithms.patches import matrix_weight, weight_matrix
from quantizer.algorithms.round_to_nearest import nearest_qparams
from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import workspace
from quantizer.numerics.codes import work_dtype_of
from quantizer.numerics.granularity import from_rows, scale_shape, to_rows
from quantizer.numerics.qparams import POWERS_OF_TWO, SMALLEST_SCALE, QParams, uncut
from quantizer.numerics.two_level import beside
from quantizer.observers import code_range_of, kernel_of

SHARES = tuple(1 - step / 20 for step in range(11))
"""Candidates for a range, as shares of the full one."""
FEW = ((32, (1.0, 0.9)), (1024, (1.0, 0.75)))
"""Fewer of them, to estimate what a weight would lose once it is clipped, for groups of up to
so many values.
"""
FEW_OF_A_CHANNEL = (1.0, 0.85, 0.7, 0.55)
"""For longer ranges: the more values, the further the outermost lie, and the more is cut."""
_POWERS = (1.0, 0.5)
_ROWS_APART = (("per_channel", 0), ("per_group", 1), ("per_group", -1))


def is_by_row(layer: nn.Module, spec: QuantizationSpec) -> bool:
    """Whether each row of the weight of a linear layer has scales of its own, so that rows can
    be looked at alone.
    """
    return (
        isinstance(layer, nn.Linear)
        and (spec.qscheme, spec.ch_axis) in _ROWS_APART
        and spec.scales_per_group == 1
    )


def candidates(spec: QuantizationSpec, shares: Sequence[float] = SHARES) -> Iterable[float]:
    """Those of `shares` that the spec's scales can have; and where its rule cuts something off,
    what does not.

    >>> [*candidates(QuantizationSpec(scale_type="poweroftwo"))]
    [1.0, 0.5]
    """
    if spec.scale_type in POWERS_OF_TWO:
        return _POWERS
    return dict.fromkeys((*shares, uncut(code_range_of(spec))))


def few_candidates(spec: QuantizationSpec) -> Iterable[float]:
    """Few of them, for the groups of `spec` or for its whole channels."""
    length = group_size(spec, sys.maxsize)
    return candidates(
        spec, next((few for most, few in FEW if length <= most), FEW_OF_A_CHANNEL)
    )


class ClipSearch:
    """Scale and zero point of each row or group, shrunk as far as the error of the layer's
    outputs gets less.

    The error of a group of columns is that of its own inputs, without those of other groups, so
    that each scale is chosen by itself. The zero point of a range that shrinks at both ends
    stays.

    Args:
        layer: for its kind and sizes.
        spec: of its weight.
        weight: as the layer stores it, float32; where it `is_by_row`, rows of any number of
            layers alike.
        gram: of the layer's inputs, [groups, depth, depth].
        shares: of the full range, what is tried.
    """

    def __init__(
        self,
        layer: nn.Module,
        spec: QuantizationSpec,
        weight: Tensor,
        gram: Tensor,
        shares: Iterable[float],
    ) -> None:
        self._layer, self._spec, self._weight, self._gram = layer, spec, weight, gram
        self._full = nearest_qparams(spec, weight)
        self._scale, self.errors = (
            self._full.scale,
            torch.full_like(self._full.scale, torch.inf, dtype=torch.float64),
        )
        rows = workspace(to_rows(weight, spec.cut), work_dtype_of(spec, weight.dtype))
        self._units, self._room = (
            rows / self._full.scale.to(rows).reshape(-1, 1),
            torch.empty_like(rows),
        )
        zero_point = self._full.zero_point.reshape(-1, 1)
        self._codes = kernel_of(spec)(zero_point.to(rows) if zero_point.any() else 0)
        for share in shares:
            self._attempt(share)

    @property
    def qparams(self) -> QParams:
        """The best; `errors` are theirs, float64, of `scale_shape`."""
        return QParams(self._scale, self._full.zero_point)

    def _attempt(self, share: float) -> None:
        smaller = (self._full.scale * share).clamp_min(SMALLEST_SCALE)
        scale = beside(smaller, self._full.scale, self._spec.scale_type)
        errors = self._errors(scale)
        # They share an exponent, so that they shrink together
        if self._spec.scales_per_group > 1:
            blocks = errors.reshape(-1, self._spec.scales_per_group)
            errors = blocks.sum(1, keepdim=True).expand_as(blocks).reshape(errors.shape)
        self._scale = torch.where(errors < self.errors, scale, self._scale)
        self.errors = torch.minimum(self.errors, errors)

    def _errors(self, scale: Tensor) -> Tensor:
        """Measured in units of the full scales, so that the weight is divided once."""
        finer = (self._full.scale / scale).to(self._units).reshape(-1, 1)
        lost = self._codes(torch.mul(self._units, finer, out=self._room)).addcmul_(
            self._units, finer, value=-1
        )
        stored = from_rows(lost, tuple(self._weight.shape), self._spec.cut)
        return (
            scale_errors(self._layer, self._spec, stored, self._gram)
            .double()
            .mul_(scale.double().square())
        )


def scale_errors(
    layer: nn.Module, spec: QuantizationSpec, difference: Tensor, gram: Tensor
) -> Tensor:
    """The squared error of outputs that the weights of each scale make by themselves, of
    `scale_shape`.

    Exact for scales of rows, of parts of rows, and of a whole tensor; for scales that lie
    across rows, inputs count as uncorrelated.
    """
    matrix = weight_matrix(layer, difference)
    whole_groups = spec.qscheme == "per_group" and spec.scales_per_group == 1
    if whole_groups and difference.dim() == 2 and spec.ch_axis in (1, -1):
        size = group_size(spec, matrix.shape[2])
        if short := -matrix.shape[2] % size:
            matrix, gram = (
                nn.functional.pad(matrix, (0, short)),
                nn.functional.pad(gram, (0, short, 0, short)),
            )
        groups, rows, count = *matrix.shape[:2], matrix.shape[2] // size
        runs = matrix.view(groups, rows, count, size).transpose(1, 2)
        within = (
            gram.view(groups, count, size, count, size)
            .diagonal(dim1=1, dim2=3)
            .permute(0, 3, 1, 2)
        )
        return (runs @ within).mul_(runs).sum(3).transpose(1, 2).reshape(groups * rows, count)
    shape = scale_shape(tuple(difference.shape), spec.cut)
    channels = 1 if getattr(layer, "transposed", False) else 0
    if (
        spec.qscheme == "per_channel"
        and spec.ch_axis == channels
        and len(matrix) * matrix.shape[1] == shape[0]
    ):
        return (matrix @ gram).mul_(matrix).sum(2).flatten()
    if spec.qscheme == "per_tensor":
        errors = (matrix @ gram).mul_(matrix)
        return errors.sum((1, 2)).view(shape) if shape else errors.sum()
    alone = matrix_weight(layer, matrix.square() * gram.diagonal(dim1=1, dim2=2)[:, None])
    return to_rows(alone, spec.cut).sum(1).view(shape)
