"""All rows of the layers that read one value in one solve: stacks them, orders their columns, and takes them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantizer.algorithms.column_qparams import along_columns, runs
from quantizer.algorithms.gptq_target import GptqTarget, Hessian, Products
from quantizer.algorithms.optimal_rounding import Columns, optimal_rounding
from quantizer.algorithms.round_to_nearest import nearest_qparams
from quantizer.config.model import QuantizationSpec
from quantizer.numerics.qparams import QParams
from quantizer.observers import kernel_of


@dataclass(frozen=True)
class Member:
    """A layer and the scales of its weight, which are the range's unless they were `given`; both weights are float32
    matrices [groups, rows, depth], `plain` is rounded."""

    name: str
    layer: nn.Module
    spec: QuantizationSpec
    qparams: QParams
    given: bool
    weight: Tensor
    plain: Tensor

    @property
    def has_runs(self) -> bool:
        """Whether its groups are runs of columns, so that a scale can be found when the first of them is rounded."""
        cut = self.spec.qscheme, self.spec.ch_axis
        return isinstance(self.layer, nn.Linear) and cut == ("per_group", 1) and not self.given


@dataclass(frozen=True)
class GptqSolution:
    """One layer's rounded weight, the weight that it was to come near to, both [groups, rows, depth], and how near
    it came: tr(d H d^T)."""

    weight: Tensor
    target: Tensor
    error: float
    qparams: QParams


def solve_rows(
    members: Sequence[Member],
    hessians: Sequence[Hessian],
    products: Sequence[Products],
    objective: GptqTarget,
    *,
    dynamic: bool,
) -> list[GptqSolution]:
    """Round layers with one spec; Hessians and products are those of each group.

    Args:
        dynamic: the scales of groups are found as their first column is rounded, from what the errors so far have made
            of their weights; else the members' scales stay.
    """
    spread = [along_columns(each.layer, each.spec, each.qparams) for each in members]
    solved = []
    for group, (hessian, sums) in enumerate(zip(hessians, products, strict=True)):
        weight = torch.cat([each.weight[group] for each in members]).T[hessian.order]
        begin, block_size = None, objective.settings.block_size
        if dynamic:
            columns, block_size = _open_columns(members[0].spec, weight)
            begin = _opens_group(members[0].spec, columns, block_size)
        else:
            stacked = [torch.cat([each[which][group] for each in spread]) for which in (0, 1)]
            columns = Columns(kernel_of(members[0].spec), *runs(*stacked)).permuted(hessian.order)
        target, first = objective.target(weight, hessian, sums)
        rounded, error = optimal_rounding(target, hessian.factor, columns, block_size, begin, first)
        error -= (hessian.damping @ (target - rounded).square_()).double()
        solved.append((_in_order(rounded, hessian), _in_order(target, hessian), error, columns))
    rows = [each.weight.shape[1] for each in members]
    weights = torch.split(torch.stack([each[0] for each in solved]), rows, 1)
    targets = torch.split(torch.stack([each[1] for each in solved]), rows, 1)
    errors = torch.split(torch.stack([each[2] for each in solved]).sum(0), rows)
    qparams = _found(solved[0][3], rows) if dynamic else [each.qparams for each in members]
    return [
        GptqSolution(weight, target, float(error.sum()), own)
        for weight, target, error, own in zip(weights, targets, errors, qparams, strict=True)
    ]


def _in_order(columns: Tensor, hessian: Hessian) -> Tensor:
    """[depth, rows] as rounded, as [rows, depth] in the layer's order."""
    out = torch.empty_like(columns)
    out[hessian.order] = columns
    return out.T


def _open_columns(spec: QuantizationSpec, weight: Tensor) -> tuple[Columns, int]:
    """Columns whose scales are not known yet, and how many share one."""
    depth, rows = weight.shape
    size = depth if spec.group_size in (None, -1) else int(spec.group_size)
    empty = weight.new_ones(-(-depth // size), rows)
    kind = torch.arange(depth, device=weight.device) // size
    return Columns(kernel_of(spec), empty, torch.zeros_like(empty), kind), size


def _opens_group(spec: QuantizationSpec, columns: Columns, size: int) -> Callable[[int, Tensor], None]:
    """Finds the scale of a group from its weights as they are when its first column is rounded."""

    def begin(start: int, block: Tensor) -> None:
        found = nearest_qparams(spec, block.T)
        columns.scale[start // size] = found.scale[:, 0]
        columns.zero_point[start // size] = found.zero_point[:, 0].float()

    return begin


def _found(columns: Columns, rows: list[int]) -> list[QParams]:
    """The scales of the layers whose rows were stacked."""
    scales, zero_points = torch.split(columns.scale.T, rows), torch.split(columns.zero_point.T.int(), rows)
    return [QParams(s.contiguous(), z.contiguous()) for s, z in zip(scales, zero_points, strict=True)]
