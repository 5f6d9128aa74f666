"""Ranges of weights that cut off what costs the outputs less than finer steps gain. Inputs are their Gram matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantizer.algorithms.patches import matrix_weight, weight_matrix
from quantizer.algorithms.round_to_nearest import nearest, nearest_qparams
from quantizer.config.model import QuantizationSpec
from quantizer.numerics.granularity import scale_shape, to_rows
from quantizer.numerics.qparams import SMALLEST_SCALE, QParams

SHRUNK = tuple(1 - step / 20 for step in range(11))
"""Candidates for a range, as shares of the full one (Lin et al. 2023, "AWQ", and its authors' code)."""
SHRUNK_POWERS = (1.0, 0.5)
"""The same where scales are powers of two."""
COARSE = (1.0, 0.85, 0.7, 0.55)
"""Fewer candidates, to estimate what a weight would lose once it is clipped."""


def clipped_qparams(
    layer: nn.Module, spec: QuantizationSpec, weight: Tensor, gram: Tensor, shares: Sequence[float] = SHRUNK
) -> QParams:
    """Scale and zero point of each row or group, shrunk so that the error of the layer's outputs is least.

    The error of a group of columns is that of its own inputs, without those of other groups, so that each scale is
    chosen by itself. The zero point of a range that shrinks at both ends stays.

    Args:
        layer: for its kind and sizes.
        weight: as the layer stores it, float32.
        gram: of the layer's inputs, [groups, depth, depth].
        shares: of the full range, the candidates where scales are not powers of two.
    """
    full = nearest_qparams(spec, weight)
    best = torch.full_like(full.scale, float("inf"))
    scale = full.scale
    for share in shares if spec.scale_type == "float" else SHRUNK_POWERS:
        tried = QParams((full.scale * share).clamp_min(SMALLEST_SCALE), full.zero_point)
        error = scale_errors(layer, spec, nearest(weight, spec, tried).sub_(weight), gram).to(best)
        scale = torch.where(error < best, tried.scale, scale)
        best = torch.minimum(best, error)
    return QParams(scale, full.zero_point)


def scale_errors(layer: nn.Module, spec: QuantizationSpec, difference: Tensor, gram: Tensor) -> Tensor:
    """The squared error of outputs that the weights of each scale make by themselves, of `scale_shape`.

    Exact for scales of rows, of parts of rows, and of a whole tensor; for scales that lie across rows, inputs count as
    uncorrelated.
    """
    matrix = weight_matrix(layer, difference)
    if spec.qscheme == "per_group" and difference.dim() == 2 and spec.ch_axis in (1, -1):
        depth, size = matrix.shape[2], spec.group_size if spec.group_size and spec.group_size > 0 else matrix.shape[2]
        runs = [slice(start, start + size) for start in range(0, depth, size)]
        parts = [(matrix[0, :, run] @ gram[0, run, run]).mul_(matrix[0, :, run]).sum(1) for run in runs]
        return torch.stack(parts, 1)
    shape = scale_shape(tuple(difference.shape), spec.qscheme, spec.ch_axis, spec.group_size)
    channels = 1 if getattr(layer, "transposed", False) else 0
    if spec.qscheme == "per_channel" and spec.ch_axis == channels and len(matrix) * matrix.shape[1] == shape[0]:
        return (matrix @ gram).mul_(matrix).sum(2).flatten()
    if spec.qscheme == "per_tensor":
        return (matrix @ gram).mul_(matrix).sum().view(shape)
    alone = matrix_weight(layer, matrix.square() * gram.diagonal(dim1=1, dim2=2)[:, None])
    return to_rows(alone, spec.qscheme, spec.ch_axis, spec.group_size).sum(1).view(shape)
