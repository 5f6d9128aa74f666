"""Round the weights of experts, each as a linear layer on the tokens that were routed to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.layers import NOT_STABLE, RoundedLayers, is_stable, round_layers
from quantizer.algorithms.gptq.target import GptqTarget, Member, Products
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.adjustment import Remark, RoundedWeight
from quantizer.layerwise.gram import UNREACHED
from quantizer.layerwise.patches import weight_matrix
from quantizer.layerwise.round_to_nearest import layer_qparams, output_error
from quantizer.nn import ExpertLinear
from quantizer.numerics.qparams import QParams


def round_experts(
    layers: Mapping[str, ExpertLinear],
    specs: Mapping[str, QuantizationSpec],
    fixed: Mapping[str, QParams],
    products: Sequence[Products],
    *,
    tokens: Sequence[int],
    target: GptqTarget,
) -> RoundedLayers:
    """Round the weights of layers of experts that read one value.

    An expert without tokens stays at round-to-nearest, as does one that gains nothing. Notes
    name them.

    Args:
        layers: by name.
        specs: of their weights.
        fixed: scales that an earlier algorithm found, by layer.
        products, tokens: of each expert.
        target: GPTQ's, GPTAQ's or Qronos'.
    """
    wholes = []
    for name, layer in layers.items():
        qparams = fixed.get(name) or layer_qparams(name, specs[name], layer.weight)
        # The scales of all experts' blocks in e4m3 share one factor
        is_fixed = name in fixed or specs[name].scale_type == "e4m3"
        wholes.append(_ExpertWeights(name, layer, specs[name], qparams, is_fixed))
    remarks: list[Remark] = []
    for expert, (sums, count) in enumerate(zip(products, tokens, strict=True)):
        members = [whole.member(expert) for whole in wholes]
        if count:
            result = round_layers(members, [sums], count, target)
        else:
            unreached = [Remark(member.name, UNREACHED) for member in members]
            result = RoundedLayers(remarks=unreached)
        remarks += result.remarks
        for whole, member in zip(wholes, members, strict=True):
            whole.add(member, result.layers.get(member.name), sums.gram)
    stable: dict[str, RoundedWeight] = {}
    for whole in wholes:
        rounded = whole.rounded()
        if is_stable(rounded, whole.spec):
            stable[whole.name] = rounded
        else:
            remarks.append(Remark(whole.name, NOT_STABLE))
    return RoundedLayers(stable, remarks)


@dataclass
class _ExpertWeights:
    """Splits a layer of experts into linear layers, and collects what they become.

    Attributes:
        qparams: the scales of all experts.
        is_fixed: whether experts must use them.
    """

    name: str
    layer: ExpertLinear
    spec: QuantizationSpec
    qparams: QParams
    is_fixed: bool
    _weights: list[Tensor] = field(default_factory=list)
    _scales: list[Tensor] = field(default_factory=list)
    _zero_points: list[Tensor] = field(default_factory=list)
    _energy: float = 0.0
    _before: float = 0.0
    _after: float = 0.0

    def member(self, expert: int) -> Member:
        """Return one expert as a layer to round."""
        linear = nn.Linear(
            self.layer.in_features, self.layer.out_features, bias=False, device="meta"
        )
        weight = weight_matrix(self.layer, self.layer.weight.detach())[expert]
        linear.weight = nn.Parameter(weight, requires_grad=False)
        spec = self.spec
        if spec.qscheme == "per_tensor":
            spec = replace(spec, group_size=None)
        qparams = self._qparams_of(expert) if self.is_fixed else None
        return Member.of(f"{self.name}[{expert}]", linear, spec, qparams)

    def add(self, member: Member, rounded: RoundedWeight | None, gram: Tensor) -> None:
        """Take in what became of the next expert, which stays at round-to-nearest if None."""
        gram = gram[None]
        energy = output_error(gram, member.weight)
        if rounded is None:
            error = output_error(gram, member.weight - member.rtn)
            self._before += error
            self._after += error
            weight, qparams = member.stored(member.rtn), member.qparams
        else:
            self._before += rounded.before * energy
            self._after += rounded.after * energy
            weight, qparams = rounded.weight, rounded.qparams
        self._energy += energy
        self._weights.append(weight)
        self._scales.append(qparams.scale)
        self._zero_points.append(qparams.zero_point)

    def rounded(self) -> RoundedWeight:
        """Return the weight of all experts, and the errors of all their outputs."""
        qparams = QParams(_joined(self._scales), _joined(self._zero_points))
        energy = self._energy or 1.0
        weight = torch.cat(self._weights)
        rounded = RoundedWeight(weight, qparams, self._before / energy, self._after / energy)
        return rounded.stored_like(self.layer.get_parameter("weight"))

    def _qparams_of(self, expert: int) -> QParams:
        shape = [self.layer.groups]
        if self.spec.qscheme != "per_tensor":
            shape += [-1, *self.qparams.scale.shape[1:]]
        scale = self.qparams.scale.view(shape)[expert]
        zero_point = self.qparams.zero_point.view(shape)[expert]
        return QParams(scale, zero_point)


def _joined(values: list[Tensor]) -> Tensor:
    """Join the scales of experts; that of a whole tensor counts as one row."""
    return torch.cat([value.view(-1, *value.shape[1:]) for value in values])
