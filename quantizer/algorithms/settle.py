"""Layers that read one value onto their grids: what GPTQ and its kin do between two legs of a stream.

Keeps plain rounding wherever the data say nothing or nothing is gained, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantizer.algorithms.adjustment import Remark, Rounded
from quantizer.algorithms.aim import Aim, Hessian, Products
from quantizer.algorithms.patches import matrix_weight, weight_matrix
from quantizer.algorithms.plain import on_grid, output_error, plain_grid
from quantizer.algorithms.solve_rows import Member, Solution, solve_rows
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.numerics.qparams import QParams
from quantizer.observers import ObservationError

NOISE = 1e-5  # of an error: less than this, float32 does not tell from none


@dataclass(frozen=True)
class Settled:
    """Layers' rounded weights by name, and what to tell of them. A layer without one stays with plain rounding."""

    rounded: dict[str, Rounded] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)


def member(name: str, layer: nn.Module, spec: QuantizationSpec, grid: QParams | None) -> Member:
    """A layer, its weight on the grid that is given or else on that of its range.

    Raises:
        DataError: the weight has NaN or infinity.
    """
    weight = layer.get_parameter("weight").detach()
    try:
        qparams = grid or plain_grid(spec, weight)
    except ObservationError as error:
        raise DataError(f"the weight of {name} has no range: {error}", help="check the checkpoint") from error
    plain = weight_matrix(layer, on_grid(weight, spec, qparams)).float()
    return Member(name, layer, spec, qparams, grid is not None, weight_matrix(layer, weight).float(), plain)


def settle(members: Sequence[Member], products: Sequence[Products], aim: Aim) -> Settled:
    """Round the weights of layers that multiply one input alike; `products` are its sums, group by group."""
    dynamic = not aim.settings.static_groups and all(each.has_runs for each in members)
    hessians = [aim.hessian(each.gram, by_size=aim.settings.desc_act and not dynamic) for each in products]
    settled = Settled({}, [Remark(each.name, text) for text in _lacks(products, hessians, aim) for each in members])
    solvable = [each for each in hessians if each is not None]
    gram = torch.stack([each.gram for each in products]) if len(products) > 1 else products[0].gram[None]
    for spec in dict.fromkeys(each.spec for each in members):
        alike = [each for each in members if each.spec == spec]
        if len(solvable) == len(hessians):
            solutions = solve_rows(alike, solvable, products, aim, dynamic=dynamic)
        else:
            solutions = [Solution(each.plain, each.weight, math.inf, each.qparams) for each in alike]
        for each, solution in zip(alike, solutions, strict=True):
            _judge(each, solution, gram, settled)
    return settled


def _lacks(products: Sequence[Products], hessians: Sequence[Hessian | None], aim: Aim) -> list[str]:
    """What the inputs lacked, in sentences."""
    found = []
    dead = sum(int((each.gram.diagonal() == 0).sum()) for each in products)
    if dead:
        found.append(f"{dead} input channels were zero on the calibration data; their weights are rounded plainly")
    if None in hessians:
        found.append("its Hessian is not positive definite even with damping 1; it is rounded plainly")
    raised = [each.raised for each in hessians if each is not None and each.raised is not None]
    if raised:
        text = f"its Hessian was not positive definite with damp_percent {aim.settings.damp_percent:g}"
        found.append(f"{text}; it was raised to {max(raised):.2g}")
    return found


def _judge(member: Member, solution: Solution, gram: Tensor, settled: Settled) -> None:
    """Take the solution if it is better than plain rounding, else that."""
    before = output_error(gram, solution.target - member.plain)
    plain, error, qparams = torch.equal(solution.weight, member.plain), solution.error, solution.qparams
    stored = _stored(member, solution.weight)
    worse = not error < before or not stored.isfinite().all()
    if not plain and not worse and not torch.equal(on_grid(stored, member.spec, qparams), stored):
        settled.remarks.append(Remark(member.name, "rounded again, its weights would change; it is rounded plainly"))
        return
    if plain or worse:
        stored, error, qparams = _stored(member, member.plain), before, member.qparams
        if not plain and not abs(solution.error - before) <= NOISE * before:
            text = (
                "GPTQ's weights gave larger errors than plain rounding on the calibration data; it is rounded plainly"
            )
            settled.remarks.append(Remark(member.name, text, is_warning=False))
        if not torch.equal(on_grid(stored, member.spec, qparams), stored):
            return
    energy = output_error(gram, member.weight) or 1.0
    settled.rounded[member.name] = Rounded(stored, qparams, before / energy, max(error, 0.0) / energy)


def _stored(member: Member, matrix: Tensor) -> Tensor:
    """A weight matrix as the layer stores it."""
    return matrix_weight(member.layer, matrix).to(member.layer.get_parameter("weight").dtype)
