"""Lay out the scales of weights column by column, as `rows.round_columns` reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.block_rounder import ColumnScales
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.clip_search import group_size
from quantizer.layerwise.patches import is_linear, matrix_shape, weight_matrix
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.observers import kernel_of

_ALONG_ROWS = (("per_tensor", None), ("per_channel", 0), ("per_group", 1))


def column_scales(
    layers: Sequence[nn.Module], spec: QuantizationSpec, qparams: Sequence[QParams], group: int
) -> ColumnScales:
    """Return the scales of one group of channels, of several layers with one spec; their weight
    matrices are one below the other.
    """
    is_along_rows = (spec.qscheme, spec.ch_axis) in _ALONG_ROWS
    is_direct = is_along_rows and all(map(is_linear, layers))
    scales, zero_points = [], []
    for layer, of_layer in zip(layers, qparams, strict=True):
        if is_direct:
            scale = _by_row(layer, of_layer.scale)
            zero_point = _by_row(layer, of_layer.zero_point)
        else:
            scale = _by_value(layer, spec, of_layer.scale)
            zero_point = _by_value(layer, spec, of_layer.zero_point)
        scales.append(scale[group])
        zero_points.append(zero_point[group])
    scale = torch.cat(scales).float()
    zero_point = torch.cat(zero_points).float()
    if is_direct:
        depth = layers[0].get_parameter("weight").shape[1]
        index = scale_index(spec, depth, scale.device)
    else:
        # Neighbouring columns of equal scales share one
        is_new = torch.ones(scale.shape[1], dtype=torch.bool, device=scale.device)
        is_new[1:] = (scale.diff() != 0).any(0) | (zero_point.diff() != 0).any(0)
        scale = scale[:, is_new]
        zero_point = zero_point[:, is_new]
        index = is_new.cumsum(0) - 1
    return ColumnScales(kernel_of(spec), scale.T.contiguous(), zero_point.T.contiguous(), index)


def scale_index(spec: QuantizationSpec, depth: int, device: torch.device) -> Tensor:
    """Return the number of the scale that each column has in its row, int64 [depth]."""
    columns_per_scale = group_size(spec, depth) // spec.scales_per_group
    return torch.arange(depth, device=device) // columns_per_scale


def _by_row(layer: nn.Module, values: Tensor) -> Tensor:
    """Return the scales or zero points of a linear layer, none of which is across rows, as
    [groups, rows, scales of a row].
    """
    groups, rows, _ = matrix_shape(layer)
    is_of_whole_matrix = values.dim() < 2 and values.numel() != groups * rows
    if is_of_whole_matrix:
        return values.reshape(-1, 1, 1).expand(groups, rows, 1)
    return values.reshape(groups, rows, -1)


def _by_value(layer: nn.Module, spec: QuantizationSpec, values: Tensor) -> Tensor:
    """Return the scale or zero point of each value of the weight matrix, float32 [groups, rows,
    depth].
    """
    shape = tuple(layer.get_parameter("weight").shape)
    length = to_rows(torch.empty(shape, device="meta"), spec.cut).shape[1]
    rows = values.float().reshape(-1, 1).expand(-1, length).contiguous()
    return weight_matrix(layer, from_rows(rows, shape, spec.cut))
