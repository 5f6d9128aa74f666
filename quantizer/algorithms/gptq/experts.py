"""Rounds the weights of experts: each as the linear layer that it is, on the tokens that were
routed to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantizer.algorithms.adjustment import Remark, Rounded
from quantizer.algorithms.gptq.layers import UNSTABLE, Member, RoundedLayers, round_layers
from quantizer.algorithms.gptq.target import GptqTarget, Products
from quantizer.algorithms.gram import UNREACHED
from quantizer.algorithms.output_error import output_error
from quantizer.algorithms.patches import weight_matrix
from quantizer.algorithms.round_to_nearest import layer_qparams, nearest
from quantizer.config.model import QuantizationSpec
from quantizer.nn import ExpertLinear
from quantizer.numerics.qparams import QParams


def round_experts(
    layers: Mapping[str, ExpertLinear],
    specs: Mapping[str, QuantizationSpec],
    given: Mapping[str, QParams],
    products: Sequence[Products],
    tokens: Sequence[int],
    target: GptqTarget,
) -> RoundedLayers:
    """Round the weights of layers of experts that read one value; `products` and `tokens` are
    those of each expert.

    An expert without tokens stays at round-to-nearest, as one does that gains nothing; remarks
    name them.
    """
    known = {
        name: given.get(name) or layer_qparams(name, specs[name], own.weight)
        for name, own in layers.items()
    }
    parts: dict[str, list[tuple[Member, Rounded | None]]] = {name: [] for name in layers}
    remarks = list[Remark]()
    for expert, (sums, count) in enumerate(zip(products, tokens, strict=True)):
        members = {}
        for name, layer in layers.items():
            # Which the experts' scales have one factor of
            fixed = name in given or specs[name].scale_type == "e4m3"
            own = _of_expert(known[name], specs[name], expert, layer.groups)
            called = f"{name}[{expert}]"
            members[called] = Member.of(
                called, _linear(layer, expert), _spec(specs[name]), own if fixed else None
            )
        if count:
            found = round_layers([*members.values()], [sums], count, target)
        else:
            found = RoundedLayers({}, [Remark(called, UNREACHED) for called in members])
        remarks += found.remarks
        for name, (called, member) in zip(layers, members.items(), strict=True):
            parts[name].append((member, found.layers.get(called)))
    whole = {name: _whole(own, products, layers[name]) for name, own in parts.items()}
    stable = {name: row for name, row in whole.items() if _is_stable(row, specs[name])}
    remarks += [Remark(name, UNSTABLE) for name in whole.keys() - stable.keys()]
    return RoundedLayers(stable, remarks)


def _spec(spec: QuantizationSpec) -> QuantizationSpec:
    """That of one expert's weight."""
    return replace(spec, group_size=None) if spec.qscheme == "per_tensor" else spec


def _linear(layer: ExpertLinear, expert: int) -> nn.Linear:
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(
        weight_matrix(layer, layer.weight.detach())[expert], requires_grad=False
    )
    return made


def _of_expert(qparams: QParams, spec: QuantizationSpec, expert: int, experts: int) -> QParams:
    """Of those of all."""
    shape = () if spec.qscheme == "per_tensor" else (-1, *qparams.scale.shape[1:])
    parts = (
        values.view(experts, *shape)[expert] for values in (qparams.scale, qparams.zero_point)
    )
    return QParams(*parts)


def _whole(
    parts: Sequence[tuple[Member, Rounded | None]],
    products: Sequence[Products],
    layer: ExpertLinear,
) -> Rounded:
    """The weight of all experts, one below the other, and the errors of all their outputs."""
    weights, qparams = list[Tensor](), list[QParams]()
    total = before = after = 0.0
    for (member, found), sums in zip(parts, products, strict=True):
        gram = sums.gram[None]
        energy, plain = (
            output_error(gram, member.weight),
            output_error(gram, member.weight - member.plain),
        )
        total += energy
        before += found.before * energy if found else plain
        after += found.after * energy if found else plain
        weights.append(found.weight if found else member.stored(member.plain))
        qparams.append(found.qparams if found else member.qparams)
    both = zip(*((own.scale, own.zero_point) for own in qparams), strict=True)
    joined = (
        torch.cat([values.view(-1, *values.shape[1:]) for values in each]) for each in both
    )
    energy = total or 1.0
    found = Rounded(torch.cat(weights), QParams(*joined), before / energy, after / energy)
    return found.beside(layer.get_parameter("weight"))


def _is_stable(found: Rounded, spec: QuantizationSpec) -> bool:
    return torch.equal(nearest(found.weight, spec, found.qparams), found.weight)
