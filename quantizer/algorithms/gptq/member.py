"""A layer whose weight GPTQ, GPTAQ or Qronos rounds, and its scales column by column, as
`rows.round_columns` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.rows import ColumnScales
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.clip_search import group_size
from quantizer.layerwise.patches import is_linear, matrix_shape, matrix_weight, weight_matrix
from quantizer.layerwise.round_to_nearest import layer_qparams, nearest, nearest_qparams
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.observers import kernel_of


@dataclass(frozen=True)
class Member:
    """Holds a layer to round, with the scales of its weight.

    Attributes:
        qparams: scales that an earlier algorithm has fixed, or those of the weight's range.
        is_fixed: whether an earlier algorithm has fixed the scales.
        weight: the float weight as a float32 matrix [groups, rows, depth].
        rtn: the weight rounded to nearest, in the same shape.
        shared_step: as `nearest_qparams` takes it.
    """

    name: str
    layer: nn.Module
    spec: QuantizationSpec
    qparams: QParams
    is_fixed: bool
    weight: Tensor
    rtn: Tensor
    shared_step: float | None = None

    @staticmethod
    def of(
        name: str,
        layer: nn.Module,
        spec: QuantizationSpec,
        fixed: QParams | None,
        *,
        shared_step: float | None = None,
    ) -> Member:
        """Create a member with the `fixed` scales, or with those of the weight's range.

        Raises:
            DataError: there is NaN or infinity in the weight.
        """
        weight = layer.get_parameter("weight").detach()
        qparams = fixed or layer_qparams(name, spec, weight, shared_step)
        return Member(
            name,
            layer,
            spec,
            qparams,
            fixed is not None,
            weight_matrix(layer, weight).float(),
            weight_matrix(layer, nearest(weight, spec, qparams)).float(),
            shared_step,
        )

    def with_spec(self, spec: QuantizationSpec) -> Member:
        """Return the same layer with the scales of its range under another spec."""
        weight = self.layer.get_parameter("weight")
        qparams = nearest_qparams(spec, weight, self.shared_step)
        return replace(self, spec=spec, qparams=qparams)

    def with_fixed(self, qparams: QParams) -> Member:
        """Return the same layer with these scales, which rounding must use."""
        return replace(self, qparams=qparams, is_fixed=True)

    @property
    def may_have_dynamic_groups(self) -> bool:
        """Check whether groups are runs of columns whose scales are not fixed. Then a group's
        scale can be found when the columns before it are rounded.
        """
        is_grouped = (self.spec.qscheme, self.spec.ch_axis) == ("per_group", 1)
        return isinstance(self.layer, nn.Linear) and is_grouped and not self.is_fixed

    def stored(self, matrix: Tensor) -> Tensor:
        """Return a weight matrix as the layer stores its weight."""
        dtype = self.layer.get_parameter("weight").dtype
        return matrix_weight(self.layer, matrix.to(dtype).contiguous())


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
