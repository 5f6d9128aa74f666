"""The scales of a layer's weight, column by column of its matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.rows import Columns
from quantizer.algorithms.patches import is_linear, weight_matrix
from quantizer.config.model import QuantizationSpec
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.observers import kernel_of


def columns_of(
    layers: Sequence[nn.Module], spec: QuantizationSpec, qparams: Sequence[QParams], group: int
) -> Columns:
    """Those of several layers' weight matrices with one spec, one below the other, in one group
    of channels.
    """
    if all(map(is_linear, layers)) and (spec.qscheme, spec.ch_axis) in _ALONG_ROWS:
        pairs = [
            [by_row(layer, values)[group] for values in (each.scale, each.zero_point)]
            for layer, each in zip(layers, qparams, strict=True)
        ]
        scale, zero_point = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        kind = kinds(spec, layers[0].get_parameter("weight").shape[1], scale.device)
        return Columns(
            kernel_of(spec),
            scale.float().T.contiguous(),
            zero_point.float().T.contiguous(),
            kind,
        )
    spread = (
        along_columns(layer, spec, each) for layer, each in zip(layers, qparams, strict=True)
    )
    scales, zero_points = zip(
        *((scale[group], zero_point[group]) for scale, zero_point in spread), strict=True
    )
    return Columns(kernel_of(spec), *runs(torch.cat(scales), torch.cat(zero_points)))


_ALONG_ROWS = (("per_tensor", None), ("per_channel", 0), ("per_group", 1))


def by_row(layer: nn.Module, values: Tensor) -> Tensor:
    """Scales or zero points of a linear layer's weight, none of which lies across rows, as
    [groups, rows, runs].
    """
    groups, rows, _ = weight_matrix(layer, layer.get_parameter("weight")).shape
    if values.dim() < 2 and values.numel() != groups * rows:  # those of whole matrices
        return values.reshape(-1, 1, 1).expand(groups, rows, 1)
    return values.reshape(groups, rows, -1)


def kinds(spec: QuantizationSpec, depth: int, device: torch.device) -> Tensor:
    """Which of its row's scales each column of a weight in groups of columns has, int64
    [depth].
    """
    return torch.arange(depth, device=device) // (
        group_size(spec, depth) // spec.scales_per_group
    )


def group_size(spec: QuantizationSpec, depth: int) -> int:
    """How many of a row's `depth` columns make a group; all of them in a spec without
    groups.
    """
    return (
        depth
        if spec.qscheme != "per_group" or spec.group_size in (None, -1)
        else int(spec.group_size or depth)
    )


def along_columns(
    layer: nn.Module, spec: QuantizationSpec, qparams: QParams
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each value of the layer's weight matrix, float32 [groups, rows,
    depth].

    >>> layer, spec = (
    ...     nn.Linear(4, 1),
    ...     QuantizationSpec(qscheme="per_group", ch_axis=1, group_size=2),
    ... )
    >>> qparams = QParams(torch.tensor([[0.5, 0.25]]), torch.zeros(1, 2, dtype=torch.int32))
    >>> along_columns(layer, spec, qparams)[0].tolist()
    [[[0.5, 0.5, 0.25, 0.25]]]
    """
    shape = tuple(layer.get_parameter("weight").shape)
    cut = spec.cut
    length = to_rows(torch.empty(shape, device="meta"), cut).shape[1]

    def spread(values: Tensor) -> Tensor:
        rows = values.float().reshape(-1, 1).expand(-1, length).contiguous()
        return weight_matrix(layer, from_rows(rows, shape, cut))

    return spread(qparams.scale), spread(qparams.zero_point)


def runs(scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbouring columns of equal scales put together.

    Args:
        scale, zero_point: [rows, depth].

    Returns:
        scale and zero point of each run [runs, rows], and the run of each column, int64
            [depth].

    >>> scale, zero_point, kind = runs(
    ...     torch.tensor([[0.5, 0.5, 0.25, 0.25]]), torch.zeros(1, 4)
    ... )
    >>> scale.tolist(), kind.tolist()
    ([[0.5], [0.25]], [0, 0, 1, 1])
    """
    fresh = torch.ones(scale.shape[1], dtype=torch.bool, device=scale.device)
    fresh[1:] = (scale.diff() != 0).any(0) | (zero_point.diff() != 0).any(0)
    return (
        scale[:, fresh].T.contiguous(),
        zero_point[:, fresh].T.contiguous(),
        fresh.cumsum(0) - 1,
    )
