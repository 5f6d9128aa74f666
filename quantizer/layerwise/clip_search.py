"""Search smaller ranges of weights, with which the outputs of a layer have smaller errors, as
AWQ does. Only scales are returned, and no rounded weights.

Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration" (arXiv 2306.00978), and its authors' code.
"""

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.patches import matrix_weight, weight_matrix
from quantizer.layerwise.round_to_nearest import nearest_qparams
from quantizer.numerics.blocks import workspace
from quantizer.numerics.codes import work_dtype_of
from quantizer.numerics.formats import POWERS_OF_TWO, SMALLEST_SCALE
from quantizer.numerics.granularity import from_rows, scale_shape, to_rows
from quantizer.numerics.qparams import QParams, uncut
from quantizer.numerics.two_level import nearest_group_scale
from quantizer.observers import code_range_of, kernel_of

SHARES = tuple(1 - step / 20 for step in range(11))
"""Candidates for a range, as shares of the full one."""
_FEW_BY_LENGTH = ((32, (1.0, 0.9)), (1024, (1.0, 0.75)))
"""The most values of a range, and the few candidates for such ranges. They are enough to
estimate the error after a search.
"""
_FEW_OF_A_CHANNEL = (1.0, 0.85, 0.7, 0.55)
"""Those for longer ranges. The more values there are, the further out is the largest, and the
more is cut off.
"""
_POWERS = (1.0, 0.5, 2.0)
"""Powers of two around the range's own. The rule of MX formats cuts off up to a quarter of a
block's largest value, which the next power does not.
"""
_ROWS_APART = (("per_channel", 0), ("per_group", 1), ("per_group", -1))
"""Granularity and axis of linear layers' weights with which no two rows share a scale."""


def has_row_scales(layer: nn.Module, spec: QuantizationSpec) -> bool:
    """Return whether no two rows of a linear layer's weight share a scale, so that any part of
    its rows can be searched without the others.
    """
    is_apart = (spec.qscheme, spec.ch_axis) in _ROWS_APART and spec.scales_per_group == 1
    return isinstance(layer, nn.Linear) and is_apart


def clip_shares(spec: QuantizationSpec, shares: Sequence[float] = SHARES) -> Iterable[float]:
    """Return those of `shares` that the spec's scales can have. If its symmetric scale cuts off
    the largest value, the share that does not is another candidate. Signed scales may have
    either sign.

    >>> [*clip_shares(QuantizationSpec(scale_type="poweroftwo"))]
    [1.0, 0.5, 2.0]
    """
    if spec.scale_type in POWERS_OF_TWO:
        return _POWERS
    if spec.has_signed_scale:
        other_sign = [-share for share in shares]
        return [*shares, *other_sign]
    return dict.fromkeys((*shares, uncut(code_range_of(spec))))


def few_clip_shares(spec: QuantizationSpec) -> Iterable[float]:
    """Return few candidates, for the length of the spec's groups or for whole channels."""
    length = group_size(spec, sys.maxsize)
    for longest, shares in _FEW_BY_LENGTH:
        if length <= longest:
            return clip_shares(spec, shares)
    return clip_shares(spec, _FEW_OF_A_CHANNEL)


class ClipSearch:
    """Finds the scale of each row or group with the least error of the layer's outputs.

    Each scale is chosen by itself: the error of a group of columns is that on its own inputs,
    without products with other groups. The zero point stays, as a range shrinks at both ends.

    Args:
        layer: for its kind and sizes.
        spec: of its weight.
        weight: float32, as the layer stores it. If it `has_row_scales`, it may be some rows, or
            the rows of several such layers.
        gram: the sum of x x^T over the layer's inputs, [groups, depth, depth].
        shares: the candidates, as shares of the full range.
        shared_step: as `nearest_qparams` takes it.

    Attributes:
        errors: the squared error of the outputs with each best scale, float64, in the shape of
            `scale_shape`.
    """

    def __init__(
        self,
        layer: nn.Module,
        spec: QuantizationSpec,
        weight: Tensor,
        gram: Tensor,
        *,
        shares: Iterable[float],
        shared_step: float | None = None,
    ) -> None:
        self._layer = layer
        self._spec = spec
        self._shape = tuple(weight.shape)
        self._gram = gram
        self._shared_step = shared_step
        self._full = nearest_qparams(spec, weight, shared_step)
        self._scale = self._full.scale
        self.errors = torch.full_like(self._scale, torch.inf, dtype=torch.float64)
        rows = workspace(to_rows(weight, spec.cut), work_dtype_of(spec, weight.dtype))
        # The weight over the full scales, which every candidate multiplies by a number
        self._units = rows / self._scale.to(rows).reshape(-1, 1)
        self._buffer = torch.empty_like(rows)
        zero_point: Tensor | int = 0
        if self._full.zero_point.any():
            zero_point = self._full.zero_point.reshape(-1, 1).to(rows)
        self._to_codes = kernel_of(spec).rounder(zero_point)
        for share in shares:
            self._try(share)

    @property
    def qparams(self) -> QParams:
        """Return the best scales, and the zero points."""
        return QParams(self._scale, self._full.zero_point)

    def _try(self, share: float) -> None:
        """Take the scales of a share of the full range where the error is smaller with them."""
        smaller = _limited(self._full.scale * share)
        scale = nearest_group_scale(
            smaller, self._full.scale, self._spec.scale_type, self._shared_step
        )
        errors = self._errors(scale)
        per_group = self._spec.scales_per_group
        if per_group > 1:
            # Scales of a group share an exponent, so they shrink together
            groups = errors.reshape(-1, per_group)
            total = groups.sum(1, keepdim=True)
            errors = total.expand_as(groups).reshape(errors.shape)
        self._scale = torch.where(errors < self.errors, scale, self._scale)
        self.errors = torch.minimum(self.errors, errors)

    def _errors(self, scale: Tensor) -> Tensor:
        """Return the squared error of the outputs with each scale, float64."""
        ratio = (self._full.scale / scale).to(self._units).reshape(-1, 1)
        codes = self._to_codes(torch.mul(self._units, ratio, out=self._buffer))
        change = codes.addcmul_(self._units, ratio, value=-1)
        stored = from_rows(change, self._shape, self._spec.cut)
        errors = scale_errors(self._layer, self._spec, stored, self._gram)
        return errors.double().mul_(scale.double().square())


def scale_errors(
    layer: nn.Module, spec: QuantizationSpec, difference: Tensor, gram: Tensor
) -> Tensor:
    """Return the squared error of the outputs that a change of the weights causes, apart for
    the weights of each scale, in the shape of `scale_shape`.

    It is exact for scales of rows, of parts of rows, and of a whole tensor. For scales across
    rows, inputs count as uncorrelated.

    Args:
        layer: for its kind and sizes.
        spec: of its weight.
        difference: the change, as the layer stores its weight.
        gram: as in `ClipSearch`.
    """
    matrix = weight_matrix(layer, difference)
    has_groups = spec.qscheme == "per_group" and spec.scales_per_group == 1
    if has_groups and difference.dim() == 2 and spec.ch_axis == 1:
        return _group_errors(matrix, gram, group_size(spec, matrix.shape[2]))
    shape = scale_shape(tuple(difference.shape), spec.cut)
    outputs_axis = 1 if getattr(layer, "transposed", False) else 0
    has_channels = spec.qscheme == "per_channel" and spec.ch_axis == outputs_axis
    if has_channels and len(matrix) * matrix.shape[1] == shape[0]:
        return (matrix @ gram).mul_(matrix).sum(2).flatten()
    if spec.qscheme == "per_tensor":
        errors = (matrix @ gram).mul_(matrix)
        return errors.sum((1, 2)).view(shape) if shape else errors.sum()
    energies = gram.diagonal(dim1=1, dim2=2)[:, None]
    by_value = matrix_weight(layer, matrix.square() * energies)
    return to_rows(by_value, spec.cut).sum(1).view(shape)


def _group_errors(matrix: Tensor, gram: Tensor, size: int) -> Tensor:
    """Return d H d^T of each `size` columns of a row, where H is the gram's block for these
    columns: [rows, groups of columns].
    """
    short = -matrix.shape[2] % size
    if short:
        matrix = nn.functional.pad(matrix, (0, short))
        gram = nn.functional.pad(gram, (0, short, 0, short))
    groups, rows, depth = matrix.shape
    count = depth // size
    d = matrix.view(groups, rows, count, size).transpose(1, 2)
    blocks = gram.view(groups, count, size, count, size)
    on_diagonal = blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    errors = (d @ on_diagonal).mul_(d).sum(3)
    return errors.transpose(1, 2).reshape(groups * rows, count)


def _limited(scale: Tensor) -> Tensor:
    """Return scales whose magnitude is at least the smallest, so that 1 / scale is finite."""
    magnitude = scale.abs().clamp_min(SMALLEST_SCALE)
    return magnitude.copysign(scale)


def group_size(spec: QuantizationSpec, depth: int) -> int:
    """Return how many of a row's `depth` columns form a group: all of them without groups."""
    if spec.qscheme != "per_group" or spec.group_size in (None, -1):
        return depth
    return int(spec.group_size or depth)
