"""Rounds the weights of layers that read one value: what GPTQ and its kin do between two
segments.

All rows of the layers go into one solve. Keeps round-to-nearest wherever the data say nothing
or nothing is gained, and says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantizer.algorithms.adjustment import Remark, Rounded
from quantizer.algorithms.gptq.column_scales import columns_of, group_size, kinds
from quantizer.algorithms.gptq.rows import Columns, optimal_rounding
from quantizer.algorithms.gptq.target import GptqTarget, Hessian, Products
from quantizer.algorithms.gram import zero_channels
from quantizer.algorithms.output_error import estimated_error, output_error
from quantizer.algorithms.patches import matrix_weight, weight_matrix
from quantizer.algorithms.round_to_nearest import layer_qparams, nearest, nearest_qparams
from quantizer.config.model import QuantizationSpec
from quantizer.numerics.qparams import QParams, uncut
from quantizer.numerics.two_level import beside
from quantizer.observers import code_range_of, kernel_of

COMPARED = 128
"""Rows of a layer, evenly strided and fewer than twice as many, whose errors tell a clear
gain.
"""
NO_GAIN = (
    "the algorithm promises no smaller errors than round-to-nearest on other data; it stays "
    "at round-to-nearest"
)
TOGETHER = 1 << 23
"""Values of layers that are solved twice at once: of these it is calls that cost, and of more
it would be memory.
"""
UNSTABLE = "its weights would change if they were rounded again; it stays at round-to-nearest"


@dataclass(frozen=True)
class Member:
    """A layer and the scales of its weight, which are the range's unless they were `given`;
    both weights are float32 matrices [groups, rows, depth], `plain` is rounded.
    """

    name: str
    layer: nn.Module
    spec: QuantizationSpec
    qparams: QParams
    given: bool
    weight: Tensor
    plain: Tensor

    @staticmethod
    def of(
        name: str, layer: nn.Module, spec: QuantizationSpec, given: QParams | None
    ) -> Member:
        """With the scales that are given, or else those of its range.

        Raises:
            DataError: there is NaN or infinity in the weight.
        """
        weight = layer.get_parameter("weight").detach()
        qparams = given or layer_qparams(name, spec, weight)
        plain = weight_matrix(layer, nearest(weight, spec, qparams)).float()
        return Member(
            name,
            layer,
            spec,
            qparams,
            given is not None,
            weight_matrix(layer, weight).float(),
            plain,
        )

    def with_spec(self, spec: QuantizationSpec) -> Member:
        """The same layer with the scales that the range gives under another spec."""
        qparams = nearest_qparams(spec, self.layer.get_parameter("weight"))
        return replace(self, spec=spec, qparams=qparams)

    @property
    def has_runs(self) -> bool:
        """Whether its groups are runs of columns, so that a scale can be found when the first
        of them is rounded.
        """
        cut = self.spec.qscheme, self.spec.ch_axis
        return isinstance(self.layer, nn.Linear) and cut == ("per_group", 1) and not self.given

    def stored(self, matrix: Tensor) -> Tensor:
        """A weight matrix as the layer stores it."""
        return matrix_weight(
            self.layer, matrix.to(self.layer.get_parameter("weight").dtype).contiguous()
        )


@dataclass(frozen=True)
class GptqSolution:
    """One layer's rounded weight, the weight that it was to come near to, both [groups, rows,
    depth], and how near each row came: d H d^T, float64 [groups, rows].
    """

    weight: Tensor
    target: Tensor
    errors: Tensor
    qparams: QParams

    @property
    def error(self) -> float:
        """The sum over rows."""
        return float(self.errors.sum())

    def best_of(self, other: GptqSolution, spec: QuantizationSpec) -> GptqSolution:
        """Each row as the solution with the smaller error has it; all rows alike where they
        share scales.
        """
        better, scale = other.errors < self.errors, self.qparams.scale
        along_rows = spec.qscheme == "per_channel" or (
            scale.dim() == 2 and spec.ch_axis in (1, -1)
        )
        if not along_rows or scale.shape[0] != better.numel():
            return other if other.error < self.error else self
        chosen = better.flatten().view(-1, *(1,) * (scale.dim() - 1))
        qparams = QParams(
            torch.where(chosen, other.qparams.scale, scale), self.qparams.zero_point
        )
        errors = torch.minimum(other.errors, self.errors)
        return replace(
            self,
            weight=torch.where(better[..., None], other.weight, self.weight),
            errors=errors,
            qparams=qparams,
        )


@dataclass(frozen=True)
class RoundedLayers:
    """Layers' rounded weights by name, and remarks on them. A layer without one stays at
    round-to-nearest.
    """

    layers: dict[str, Rounded] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)


def round_layers(
    members: Sequence[Member], products: Sequence[Products], tokens: int, target: GptqTarget
) -> RoundedLayers:
    """Round the weights of layers that multiply one input alike; `products` are its sums over
    tokens, group by group.

    A result must be better than round-to-nearest by what `depth` choices gain on so few tokens
    by chance: the error on other data is about 1 + depth / tokens times as large (Akaike 1969,
    "Fitting autoregressive models for prediction").
    """
    dynamic = not target.settings.static_groups and all(each.has_runs for each in members)
    hessians = [
        target.hessian(each.gram, by_size=target.settings.desc_act and not dynamic)
        for each in products
    ]
    lacks = _lacks(products, hessians, tokens, target)
    rounded = RoundedLayers({}, [Remark(each.name, text) for text in lacks for each in members])
    solvable = [each for each in hessians if each is not None]
    gram = (
        torch.stack([each.gram for each in products])
        if len(products) > 1
        else products[0].gram[None]
    )
    for spec in dict.fromkeys(each.spec for each in members):
        alike = [each for each in members if each.spec == spec]
        if len(solvable) == len(hessians):
            solutions = _search(alike, solvable, products, target, dynamic=dynamic)
        else:
            hopeless = gram.new_full((1, 1), math.inf)
            solutions = [
                GptqSolution(each.plain, each.weight, hopeless, each.qparams) for each in alike
            ]
        for each, solution in zip(alike, solutions, strict=True):
            _judge(each, solution, gram, 1 + gram.shape[1] / tokens, rounded)
    return rounded


def _lacks(
    products: Sequence[Products],
    hessians: Sequence[Hessian | None],
    tokens: int,
    target: GptqTarget,
) -> list[str]:
    """What the inputs lacked, in sentences."""
    found = []
    dead = sum(int((each.gram.diagonal() == 0).sum()) for each in products)
    if dead:
        found.append(
            f"{zero_channels(dead)}; {'its' if dead == 1 else 'their'} weights stay at "
            "round-to-nearest"
        )
    if None in hessians:
        found.append(
            "its Hessian is not positive definite even with damping 1; it stays at "
            "round-to-nearest"
        )
    raised = [each.raised for each in hessians if each is not None and each.raised is not None]
    if raised:
        found.append(
            f"its Hessian was not positive definite; {max(raised):.2g} of its mean diagonal "
            "was added"
        )
    depth = len(products[0].gram)
    least = target.tokens_per_input * depth
    if tokens < least:
        found.append(
            f"{target.settings.name} fits its {depth} inputs to {tokens} tokens, and on fewer "
            f"than {least} that may not hold for other data; calibrate with more, or with a "
            "larger alpha"
        )
    return found


def _judge(
    member: Member,
    solution: GptqSolution,
    gram: Tensor,
    optimism: float,
    rounded: RoundedLayers,
) -> None:
    """Take the solution if it promises to be better than round-to-nearest, else that."""
    before, after = _errors(member, solution, gram, optimism)
    weight, plain = member.stored(solution.weight), member.stored(member.plain)
    qparams = solution.qparams
    is_plain = torch.equal(weight, plain)
    is_better = (
        not is_plain
        and after * optimism < before
        and math.isfinite(weight.sum(dtype=torch.float32))
    )
    if not is_better:
        if not is_plain and math.isfinite(after) and after:
            rounded.remarks.append(Remark(member.name, NO_GAIN, is_warning=False))
        weight, after, qparams = plain, before, member.qparams
    if torch.equal(nearest(weight, member.spec, qparams), weight):
        found = Rounded(weight, qparams, before, max(after, 0.0))
        rounded.layers[member.name] = found.beside(member.layer.get_parameter("weight"))
    elif is_better:
        rounded.remarks.append(Remark(member.name, UNSTABLE))


def _errors(
    member: Member, solution: GptqSolution, gram: Tensor, optimism: float
) -> tuple[float, float]:
    """Errors of round-to-nearest and of the solution, as shares of the outputs' energy.

    That of the solution is known; where it is clearly smaller, the other and the energy are
    estimated from some rows.
    """
    lost, stride = solution.target - member.plain, member.weight.shape[1] // COMPARED
    if stride > 1:
        before = estimated_error(gram, lost, stride)
        if 2 * solution.error * optimism < before:
            energy = estimated_error(gram, member.weight, stride) or 1.0
            return before / energy, solution.error / energy
    energy = output_error(gram, member.weight) or 1.0
    return output_error(gram, lost) / energy, solution.error / energy


def _search(
    members: Sequence[Member],
    hessians: Sequence[Hessian],
    products: Sequence[Products],
    target: GptqTarget,
    *,
    dynamic: bool,
) -> list[GptqSolution]:
    """Round layers with one spec; where its rule cuts something off the range, with the scales
    that do not as well.
    """
    count, spec = len(members), members[0].spec
    if uncut(code_range_of(spec)) == 1 or any(each.given for each in members):
        return _solve(members, hessians, products, target, dynamic=dynamic)
    wide = [each.with_spec(replace(spec, symmetric_scale="quant_max")) for each in members]
    is_small = sum(each.weight.numel() for each in members) <= TOGETHER
    found = [
        solution
        for part in ([[*members, *wide]] if is_small else [members, wide])
        for solution in _solve(part, hessians, products, target, dynamic=dynamic)
    ]
    return [
        each.best_of(other, spec)
        for each, other in zip(found[:count], found[count:], strict=True)
    ]


def _solve(
    members: Sequence[Member],
    hessians: Sequence[Hessian],
    products: Sequence[Products],
    objective: GptqTarget,
    *,
    dynamic: bool,
) -> list[GptqSolution]:
    """Round layers with one spec, but for its rule; Hessians and products are those of each
    group of channels.

    With `dynamic`, the scales of groups of columns are found as their first one is rounded,
    from what the errors so far have made of their weights; else the members' scales stay.
    """
    spec, block_size = members[0].spec, objective.settings.block_size
    layers, qparams = [each.layer for each in members], [each.qparams for each in members]
    weights, targets, errors = [], [], []
    for group, (hessian, sums) in enumerate(zip(hessians, products, strict=True)):
        stacked = torch.cat([each.weight[group] for each in members])
        weight = hessian.placed(stacked.T)
        begin: Callable[[int, Tensor], None] | None = None
        if dynamic:
            columns, block_size, begin = _open_columns(members, weight)
        else:
            columns = columns_of(layers, spec, qparams, group)
            columns = replace(columns, kind=hessian.placed(columns.kind))
        target, first = objective.target(weight, hessian, sums)
        rounded, error = optimal_rounding(
            target, hessian.factor, columns, block_size, begin, first
        )
        errors.append(error - (hessian.damping @ (target - rounded).square_()).double())
        weights.append(hessian.back(rounded).T)
        targets.append(stacked if target is weight else hessian.back(target).T)
    rows = [each.weight.shape[1] for each in members]
    if dynamic:
        found = (
            torch.split(columns.scale.T, rows),
            torch.split(columns.zero_point.T.int(), rows),
        )
        qparams = [QParams(s.contiguous(), z.contiguous()) for s, z in zip(*found, strict=True)]
    matrices = (
        torch.split(each[0][None] if len(each) == 1 else torch.stack(each), rows, 1)
        for each in (weights, targets)
    )
    errors_of_rows = torch.split(torch.stack(errors), rows, 1)
    return [
        GptqSolution(*each) for each in zip(*matrices, errors_of_rows, qparams, strict=True)
    ]


def _open_columns(
    members: Sequence[Member], weight: Tensor
) -> tuple[Columns, int, Callable[[int, Tensor], None]]:
    """Columns whose scales are not known yet, how many share one, and what finds it from their
    weights as they are when the first of them is rounded.
    """
    (depth, rows), spec = weight.shape, members[0].spec
    size, each = group_size(spec, depth), spec.scales_per_group
    empty = weight.new_ones(-(-depth // size) * each, rows)
    columns = Columns(
        kernel_of(spec), empty, torch.zeros_like(empty), kinds(spec, depth, weight.device)
    )
    parts = [
        (each, rows, nearest_qparams(each, weight[:, rows].T).scale)
        for each, rows in _rows_by_spec(members)
    ]

    def begin(start: int, block: Tensor) -> None:
        here = slice(start // size * each, (start // size + 1) * each)
        for own, rows, known in parts:
            free = replace(own, scale_type="float") if own.scale_type == "e4m3" else own
            found = nearest_qparams(free, block[:, rows].T)
            columns.scale[here, rows] = beside(found.scale, known, own.scale_type).T
            columns.zero_point[here, rows] = found.zero_point.T.float()

    return columns, size, begin


def _rows_by_spec(members: Sequence[Member]) -> Iterator[tuple[QuantizationSpec, slice]]:
    """Which rows of the members' matrices, one below the other, have each spec."""
    start = 0
    for spec, alike in itertools.groupby(members, lambda each: each.spec):
        stop = start + sum(each.weight.shape[1] for each in alike)
        yield spec, slice(start, stop)
        start = stop
