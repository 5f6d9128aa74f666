"""Scales as the columns of a weight matrix see them: whatever way scales are cut, each column has one for each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantizer.algorithms.patches import weight_matrix
from quantizer.config.model import QuantizationSpec
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.observers import axis_of


def along_columns(layer: nn.Module, spec: QuantizationSpec, qparams: QParams) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each value of the layer's weight matrix, float32 [groups, rows, depth].

    >>> layer, spec = nn.Linear(4, 1), QuantizationSpec(qscheme="per_group", ch_axis=1, group_size=2)
    >>> qparams = QParams(torch.tensor([[0.5, 0.25]]), torch.zeros(1, 2, dtype=torch.int32))
    >>> along_columns(layer, spec, qparams)[0].tolist()
    [[[0.5, 0.5, 0.25, 0.25]]]
    """
    shape = tuple(layer.get_parameter("weight").shape)
    cut = spec.qscheme, axis_of(spec), spec.group_size
    length = to_rows(torch.empty(shape, device="meta"), *cut).shape[1]

    def spread(values: Tensor) -> Tensor:
        rows = values.float().reshape(-1, 1).expand(-1, length).contiguous()
        return weight_matrix(layer, from_rows(rows, shape, *cut))

    return spread(qparams.scale), spread(qparams.zero_point)


def runs(scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbouring columns of equal scales put together.

    Args:
        scale, zero_point: [rows, depth].

    Returns:
        scale and zero point of each run [runs, rows], and the run of each column, int64 [depth].

    >>> scale, zero_point, kind = runs(torch.tensor([[0.5, 0.5, 0.25, 0.25]]), torch.zeros(1, 4))
    >>> scale.tolist(), kind.tolist()
    ([[0.5], [0.25]], [0, 0, 1, 1])
    """
    fresh = torch.ones(scale.shape[1], dtype=torch.bool, device=scale.device)
    fresh[1:] = (scale.diff() != 0).any(0) | (zero_point.diff() != 0).any(0)
    return scale[:, fresh].T.contiguous(), zero_point[:, fresh].T.contiguous(), fresh.cumsum(0) - 1
