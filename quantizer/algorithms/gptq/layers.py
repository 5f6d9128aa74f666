"""Round the weights of layers that read one value, by GPTQ, GPTAQ or Qronos.

All rows of the layers are solved together. A layer stays at round-to-nearest (RTN) if the data
say nothing about it, or if the result is not better. Notes name such layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quantizer.algorithms.gptq.rows import ColumnScales, OpenGroups, round_columns
from quantizer.algorithms.gptq.sweeps import Refinement, may_refit_scales
from quantizer.algorithms.gptq.target import (
    GptqTarget,
    Hessian,
    Member,
    Products,
    column_scales,
    scale_index,
)
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.adjustment import Remark, RoundedWeight
from quantizer.layerwise.clip_search import ClipSearch, clip_shares, group_size
from quantizer.layerwise.gram import zero_channels
from quantizer.layerwise.round_to_nearest import (
    estimated_error,
    nearest,
    nearest_qparams,
    output_error,
)
from quantizer.numerics.qparams import QParams, uncut
from quantizer.numerics.two_level import nearest_group_scale
from quantizer.observers import code_range_of, kernel_of

_COMPARED_ROWS = 128
"""RTN's error is estimated from so many evenly strided rows, or up to twice as many."""
_MAX_SOLVED_TWICE = 1 << 23
"""On the CPU, layers with so many weights at most are solved with two scales in one call."""
_MAX_SOLVED_TWICE_ON_A_DEVICE = 1 << 27
"""The same on other devices."""
NO_GAIN = (
    "the algorithm promises no smaller errors than round-to-nearest on other data; it stays "
    "at round-to-nearest"
)
NOT_STABLE = "its weights would change if they were rounded again; it stays at round-to-nearest"


@dataclass(frozen=True)
class GptqSolution:
    """Holds what solving found for one layer.

    Attributes:
        weight: rounded, [groups, rows, depth].
        target: the weight to approximate, same shape.
        errors: d H d^T of each row, with d their difference, float64 [groups, rows].
        qparams: of the rounded weight.
    """

    weight: Tensor
    target: Tensor
    errors: Tensor
    qparams: QParams

    @property
    def error(self) -> float:
        """Return the sum of the rows' errors."""
        return float(self.errors.sum())

    def best_of(self, other: GptqSolution, spec: QuantizationSpec) -> GptqSolution:
        """Return for each row the better one of two solutions with different symmetric scales.
        Rows that share scales all come from the solution with the smaller sum of errors.
        """
        scale = self.qparams.scale
        is_better = other.errors < self.errors
        has_row_scales = spec.qscheme == "per_channel"
        # Groups that run along a row: the scale is [rows, groups]
        if scale.dim() == 2 and spec.ch_axis == 1:
            has_row_scales = True
        if not has_row_scales or scale.shape[0] != is_better.numel():
            return other if other.error < self.error else self
        by_scale = is_better.flatten().view(-1, *(1,) * (scale.dim() - 1))
        best_scale = torch.where(by_scale, other.qparams.scale, scale)
        # Both are symmetric, so that all zero points are 0
        return replace(
            self,
            weight=torch.where(is_better[..., None], other.weight, self.weight),
            errors=torch.minimum(other.errors, self.errors),
            qparams=QParams(best_scale, self.qparams.zero_point),
        )


@dataclass(frozen=True)
class RoundedLayers:
    """Holds layers' rounded weights by name, and notes. A missing layer stays at RTN."""

    layers: dict[str, RoundedWeight] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)


def round_layers(
    members: Sequence[Member], products: Sequence[Products], tokens: int, target: GptqTarget
) -> RoundedLayers:
    """Round the weights of layers that multiply the same patches of one input.

    Each row fits `depth` values to the tokens of the calibration data. Its error on other data
    is about 1 + depth / tokens times as large (Akaike 1969, "Fitting autoregressive models for
    prediction"). A result is used if it is better than RTN even after that factor.

    Args:
        members: the layers.
        products: sums over the tokens of the input, for each group of channels.
        tokens: how many there were.
        target: GPTQ's, GPTAQ's or Qronos'.
    """
    is_dynamic = not target.settings.static_groups and all(
        member.may_have_dynamic_groups for member in members
    )
    by_size = target.settings.desc_act
    hessians = [target.hessian(sums.gram, by_size=by_size) for sums in products]
    result = RoundedLayers()
    for text in _data_problems(products, hessians, tokens, target):
        result.remarks.extend(Remark(member.name, text) for member in members)
    solvable = [hessian for hessian in hessians if hessian is not None]
    gram = _stacked([sums.gram for sums in products])
    optimism = 1 + gram.shape[1] / tokens
    for spec in dict.fromkeys(member.spec for member in members):
        alike = [member for member in members if member.spec == spec]
        if len(solvable) == len(hessians):
            to_solve = alike
            if target.settings.scale_search and not is_dynamic:
                to_solve = _with_searched_scales(alike, solvable, gram)
            solve = partial(
                _solve,
                hessians=solvable,
                products=products,
                target=target,
                is_dynamic=is_dynamic,
            )
            solutions = _solve_ranges(to_solve, solve)
        else:
            # A group of channels has no solution, and so the layers stay at RTN
            infinite = gram.new_full((1, 1), math.inf)
            solutions = [
                GptqSolution(member.rtn, member.weight, infinite, member.qparams)
                for member in alike
            ]
        for member, solution in zip(alike, solutions, strict=True):
            _add_better(member, solution, gram, optimism, result=result)
    return result


def is_stable(rounded: RoundedWeight, spec: QuantizationSpec) -> bool:
    """Check whether rounding the weight again changes nothing."""
    return torch.equal(nearest(rounded.weight, spec, rounded.qparams), rounded.weight)


def _with_searched_scales(
    members: Sequence[Member], hessians: Sequence[Hessian], gram: Tensor
) -> list[Member]:
    """Return the layers with the scales that have the least error when each weight is rounded
    on its own. Scales that an earlier algorithm has fixed stay.

    The scale of a range clips nothing. With few bits its steps are so coarse that most weights
    of a group become 0. A smaller scale clips a few weights, and rounding the other columns
    makes up for part of that.

    The error of a group is that on its own inputs, as in `ClipSearch`, with the damping that
    rounding has.

    Args:
        members: layers that read one input.
        hessians: of each group of channels.
        gram: the sum of x x^T of each group of channels, [groups, depth, depth].
    """
    dampings = [hessian.restored(hessian.damping) for hessian in hessians]
    damped = gram.clone()
    damped.diagonal(dim1=1, dim2=2).add_(torch.stack(dampings))
    searched = []
    for member in members:
        if not member.is_fixed:
            search = ClipSearch(
                member.layer,
                member.spec,
                member.layer.get_parameter("weight").detach().float(),
                damped,
                shares=clip_shares(member.spec),
                shared_step=member.shared_step,
            )
            member = replace(member, qparams=search.qparams, is_fixed=True)
        searched.append(member)
    return searched


def _data_problems(
    products: Sequence[Products],
    hessians: Sequence[Hessian | None],
    tokens: int,
    target: GptqTarget,
) -> list[str]:
    """Return sentences about inputs of zeros, a Hessian that needed damping, few tokens."""
    problems = []
    dead = sum(int((sums.gram.diagonal() == 0).sum()) for sums in products)
    if dead:
        whose = "its" if dead == 1 else "their"
        problems.append(f"{zero_channels(dead)}; {whose} weights stay at round-to-nearest")
    if None in hessians:
        problems.append(
            "its Hessian is not positive definite even with damping 1; it stays at "
            "round-to-nearest"
        )
    raised = [h.raised for h in hessians if h is not None and h.raised is not None]
    if raised:
        problems.append(
            f"its Hessian was not positive definite; {max(raised):.2g} of its mean diagonal "
            "was added"
        )
    depth = len(products[0].gram)
    least = target.tokens_per_input * depth
    if tokens < least:
        problems.append(
            f"{target.settings.name} fits its {depth} inputs to {tokens} tokens, and with "
            f"fewer than {least} the result may not hold for other data; calibrate with more, "
            "or with a larger alpha"
        )
    return problems


def _add_better(
    member: Member,
    solution: GptqSolution,
    gram: Tensor,
    optimism: float,
    *,
    result: RoundedLayers,
) -> None:
    """Add the solution to `result` if it promises to be better than RTN, and RTN otherwise."""
    error_rtn, error = _relative_errors(member, solution, gram, optimism)
    weight = member.stored(solution.weight)
    rtn = member.stored(member.rtn)
    is_rtn = torch.equal(weight, rtn)
    is_better = (
        not is_rtn
        and error * optimism < error_rtn
        and math.isfinite(weight.sum(dtype=torch.float32))
    )
    if is_better:
        rounded = RoundedWeight(weight, solution.qparams, error_rtn, max(error, 0.0))
    else:
        rounded = RoundedWeight(rtn, member.qparams, error_rtn, max(error_rtn, 0.0))
        # An infinite error has a remark of its own; with an error of 0, RTN has none either
        if not is_rtn and math.isfinite(error) and error:
            result.remarks.append(Remark(member.name, NO_GAIN, is_warning=False))
    if is_stable(rounded, member.spec):
        float_weight = member.layer.get_parameter("weight")
        result.layers[member.name] = rounded.stored_like(float_weight)
    elif is_better:
        result.remarks.append(Remark(member.name, NOT_STABLE))


def _relative_errors(
    member: Member, solution: GptqSolution, gram: Tensor, optimism: float
) -> tuple[float, float]:
    """Return the errors of RTN and of the solution as shares of the outputs' energy.

    Both are computed from some rows if these show that the solution is clearly better.
    """
    rtn_difference = solution.target - member.rtn
    stride = member.weight.shape[1] // _COMPARED_ROWS
    if stride > 1:
        error_rtn = estimated_error(gram, rtn_difference, stride)
        if 2 * solution.error * optimism < error_rtn:
            energy = estimated_error(gram, member.weight, stride) or 1.0
            return error_rtn / energy, solution.error / energy
    energy = output_error(gram, member.weight) or 1.0
    return output_error(gram, rtn_difference) / energy, solution.error / energy


def _solve_ranges(
    members: Sequence[Member], solve: Callable[[Sequence[Member]], list[GptqSolution]]
) -> list[GptqSolution]:
    """Round layers with one spec.

    The symmetric scale "half_range" clips the largest value. Then the layers are also rounded
    with the larger scale "quant_max", which clips nothing, and the better result is returned.
    """
    spec = members[0].spec
    is_fixed = any(member.is_fixed for member in members)
    if is_fixed or uncut(code_range_of(spec)) == 1:
        return solve(members)
    uncut_spec = replace(spec, symmetric_scale="quant_max")
    uncut_members = [member.with_spec(uncut_spec) for member in members]
    solved_together = [[*members], uncut_members]
    max_values = _MAX_SOLVED_TWICE_ON_A_DEVICE
    if members[0].weight.device.type == "cpu":
        max_values = _MAX_SOLVED_TWICE
    if sum(member.weight.numel() for member in members) <= max_values:
        solved_together = [[*members, *uncut_members]]
    solutions: list[GptqSolution] = []
    for batch in solved_together:
        solutions += solve(batch)
    count = len(members)
    pairs = zip(solutions[:count], solutions[count:], strict=True)
    return [solution.best_of(other, spec) for solution, other in pairs]


def _solve(
    members: Sequence[Member],
    *,
    hessians: Sequence[Hessian],
    products: Sequence[Products],
    target: GptqTarget,
    is_dynamic: bool,
) -> list[GptqSolution]:
    """Round layers whose specs differ in the symmetric scale at most, group by group.

    Args:
        members: the layers.
        hessians, products: of each group of channels.
        target: what to approximate.
        is_dynamic: find the scales of a group of columns just before its first column is
            rounded, from the weights that GPTQ has updated until then. Otherwise the members'
            scales stay.
    """
    layers = [member.layer for member in members]
    rows = [member.weight.shape[1] for member in members]
    qparams = [member.qparams for member in members]
    weights, targets, errors = [], [], []
    for group, (hessian, sums) in enumerate(zip(hessians, products, strict=True)):
        float_weight = torch.cat([member.weight[group] for member in members])
        W = hessian.permuted(float_weight.T)  # noqa: N806 - the paper's letter
        goal, first_column = target.target(W, hessian, sums)
        columns = column_scales(layers, members[0].spec, qparams, group)
        dynamic = None
        open_groups = None
        if is_dynamic:
            dynamic = _DynamicGroups(members, float_weight.T)
            columns = dynamic.columns
            places = hessian.order.argsort()
            by_group = torch.split(places, dynamic.size)
            open_groups = OpenGroups(by_group, dynamic.begin)
        index = hessian.permuted(columns.index)
        rounded, error = round_columns(
            goal,
            hessian.factor,
            replace(columns, index=index),
            block_size=target.settings.block_size,
            groups=open_groups,
            first=first_column,
        )
        if dynamic is not None:
            qparams = dynamic.qparams(rows)
        # `error` is that of the damped Hessian; the outputs' error has no damping
        damping_error = hessian.damping @ (goal - rounded).square_()
        error -= damping_error.double()
        weight = hessian.restored(rounded)
        restored_goal = float_weight if goal is W else hessian.restored(goal).T
        if target.settings.sweeps:
            damping = hessian.restored(hessian.damping)
            refinement = Refinement(restored_goal.T, weight, sums.gram, damping, columns)
            refits_scales = may_refit_scales(members)
            for _ in range(target.settings.sweeps):
                refinement.sweep(scales_too=refits_scales)
            error = refinement.errors()
            if refits_scales:
                qparams = refinement.qparams(qparams)
        weights.append(weight.T)
        targets.append(restored_goal)
        errors.append(error)
    parts = [torch.split(_stacked(part), rows, 1) for part in (weights, targets, errors)]
    return [GptqSolution(*part) for part in zip(*parts, qparams, strict=True)]


def _stacked(groups: Sequence[Tensor]) -> Tensor:
    """Stack the groups; a single group is not copied."""
    if len(groups) == 1:
        return groups[0][None]
    return torch.stack([*groups])


class _DynamicGroups:
    """Finds the scales of a group of columns when its first column is rounded."""

    def __init__(self, members: Sequence[Member], weight: Tensor) -> None:
        depth, rows = weight.shape
        spec = members[0].spec
        self.size = group_size(spec, depth)
        self._scales_per_group = spec.scales_per_group
        groups = -(-depth // self.size)
        scale = weight.new_ones(groups * self._scales_per_group, rows)
        index = scale_index(spec, depth, weight.device)
        self.columns = ColumnScales(kernel_of(spec), scale, torch.zeros_like(scale), index)
        self._parts = []
        for member, part in _rows_alike(members):
            full_weight = weight[:, part].T
            full_scale = nearest_qparams(member.spec, full_weight, member.shared_step).scale
            self._parts.append((member, part, full_scale))

    def begin(self, group: int, block: Tensor) -> None:
        """Find the scales of a group. `block` has its weights [columns, rows], updated by the
        columns that are rounded.
        """
        scales = slice(group * self._scales_per_group, (group + 1) * self._scales_per_group)
        for member, rows, full_scale in self._parts:
            spec = block_spec = member.spec
            if spec.scale_type == "e4m3":
                # The tensor's float factor is known, and below only codes are rounded to it
                block_spec = replace(spec, scale_type="float")
            qparams = nearest_qparams(block_spec, block[:, rows].T)
            scale = nearest_group_scale(
                qparams.scale, full_scale, spec.scale_type, member.shared_step
            )
            self.columns.scale[scales, rows] = scale.T
            self.columns.zero_point[scales, rows] = qparams.zero_point.T.float()

    def qparams(self, rows: list[int]) -> list[QParams]:
        """Return the scales of each member; `rows` has their numbers of rows."""
        scales = torch.split(self.columns.scale.T, rows)
        zero_points = torch.split(self.columns.zero_point.T.int(), rows)
        pairs = zip(scales, zero_points, strict=True)
        return [QParams(scale.contiguous(), zero.contiguous()) for scale, zero in pairs]


def _rows_alike(members: Sequence[Member]) -> Iterator[tuple[Member, slice]]:
    """Yield a member of each run of members with one spec and one step, with the run's rows in
    the members' stacked matrices.
    """
    start = 0
    runs = itertools.groupby(members, lambda member: (member.spec, member.shared_step))
    for _, run in runs:
        alike = list(run)
        stop = start + sum(member.weight.shape[1] for member in alike)
        yield alike[0], slice(start, stop)
        start = stop
