"""Rounds the weights of layers that read one value: what GPTQ and its kin do between two segments.

Keeps round-to-nearest wherever the data say nothing or nothing is gained, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantizer.algorithms.adjustment import Remark, Rounded
from quantizer.algorithms.gptq_rows import GptqSolution, Member, solve_rows
from quantizer.algorithms.gptq_target import GptqTarget, Hessian, Products
from quantizer.algorithms.gram import zero_channels
from quantizer.algorithms.patches import matrix_weight, weight_matrix
from quantizer.algorithms.round_to_nearest import nearest, nearest_qparams, output_error
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.numerics.qparams import QParams
from quantizer.observers import ObservationError

NO_GAIN = "the algorithm promises no smaller errors than round-to-nearest on other data; it stays at round-to-nearest"
UNSTABLE = "its weights would change if they were rounded again; it stays at round-to-nearest"


@dataclass(frozen=True)
class RoundedLayers:
    """Layers' rounded weights by name, and remarks on them. A layer without one stays at round-to-nearest."""

    layers: dict[str, Rounded] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)


def member(name: str, layer: nn.Module, spec: QuantizationSpec, given: QParams | None) -> Member:
    """A layer, its weight and the scales that are given, or else those of its range.

    Raises:
        DataError: the weight has NaN or infinity.
    """
    weight = layer.get_parameter("weight").detach()
    try:
        qparams = given or nearest_qparams(spec, weight)
    except ObservationError as error:
        raise DataError(f"the weight of {name} has no range: {error}", help="check the checkpoint") from error
    plain = weight_matrix(layer, nearest(weight, spec, qparams)).float()
    return Member(name, layer, spec, qparams, given is not None, weight_matrix(layer, weight).float(), plain)


def round_layers(
    members: Sequence[Member], products: Sequence[Products], tokens: int, target: GptqTarget
) -> RoundedLayers:
    """Round the weights of layers that multiply one input alike; `products` are its sums over tokens, group by group.

    A result must be better than round-to-nearest by what `depth` choices gain on so few tokens by chance: the error on
    other data is about 1 + depth / tokens times as large (Akaike 1969, "Fitting autoregressive models for prediction").
    """
    dynamic = not target.settings.static_groups and all(each.has_runs for each in members)
    hessians = [target.hessian(each.gram, by_size=target.settings.desc_act and not dynamic) for each in products]
    lacks = [*_lacks(products, hessians), *_few(tokens, products[0], target)]
    rounded = RoundedLayers({}, [Remark(each.name, text) for text in lacks for each in members])
    solvable = [each for each in hessians if each is not None]
    gram = torch.stack([each.gram for each in products]) if len(products) > 1 else products[0].gram[None]
    for spec in dict.fromkeys(each.spec for each in members):
        alike = [each for each in members if each.spec == spec]
        if len(solvable) == len(hessians):
            solutions = solve_rows(alike, solvable, products, target, dynamic=dynamic)
        else:
            solutions = [GptqSolution(each.plain, each.weight, math.inf, each.qparams) for each in alike]
        for each, solution in zip(alike, solutions, strict=True):
            _judge(each, solution, gram, 1 + gram.shape[1] / tokens, rounded)
    return rounded


def _lacks(products: Sequence[Products], hessians: Sequence[Hessian | None]) -> list[str]:
    """What the inputs lacked, in sentences."""
    found = []
    dead = sum(int((each.gram.diagonal() == 0).sum()) for each in products)
    if dead:
        found.append(f"{zero_channels(dead)}; {'its' if dead == 1 else 'their'} weights stay at round-to-nearest")
    if None in hessians:
        found.append("its Hessian is not positive definite even with damping 1; it stays at round-to-nearest")
    raised = [each.raised for each in hessians if each is not None and each.raised is not None]
    if raised:
        found.append(f"its Hessian was not positive definite; {max(raised):.2g} of its mean diagonal was added")
    return found


def _few(tokens: int, products: Products, target: GptqTarget) -> list[str]:
    """What there is to say of the number of tokens."""
    depth = len(products.gram)
    least = target.tokens_per_input * depth
    if tokens >= least:
        return []
    return [
        f"{target.settings.name} fits its {depth} inputs to {tokens} tokens, and on fewer than {least} that may not "
        "hold for other data; calibrate with more, or with a larger alpha"
    ]


def _judge(member: Member, solution: GptqSolution, gram: Tensor, optimism: float, rounded: RoundedLayers) -> None:
    """Take the solution if it promises to be better than round-to-nearest, else that."""
    before = output_error(gram, solution.target - member.plain)
    weight, error, qparams = _stored(member, solution.weight), solution.error, solution.qparams
    if torch.equal(solution.weight, member.plain):
        error = before
    else:
        better = error * optimism < before and bool(weight.isfinite().all())
        if better and not torch.equal(nearest(weight, member.spec, qparams), weight):
            rounded.remarks.append(Remark(member.name, UNSTABLE))
            return
        if not better:
            weight, error, qparams = _stored(member, member.plain), before, member.qparams
            if math.isfinite(solution.error) and solution.error:
                rounded.remarks.append(Remark(member.name, NO_GAIN, is_warning=False))
    if torch.equal(nearest(weight, member.spec, qparams), weight):
        energy = output_error(gram, member.weight) or 1.0
        rounded.layers[member.name] = Rounded(weight, qparams, before / energy, max(error, 0.0) / energy)


def _stored(member: Member, matrix: Tensor) -> Tensor:
    """A weight matrix as the layer stores it."""
    return matrix_weight(member.layer, matrix).to(member.layer.get_parameter("weight").dtype)
