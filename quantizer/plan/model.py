"""The plan: for each (layer, role) one spec and where its values came from. For all others, why
they stay float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import QuantizationSpec, Settings
from quantizer.config.roles import is_of_channels, is_parameter, parameter_name
from quantizer.graph.ir import Graph, Node

Key = tuple[str, str]
"""A layer and a role, which together name one tensor."""
PartRuns = tuple[tuple[Key | None, int], ...]
"""The tensor of each run of channels, None for constants, and the run's length."""
TensorSpecs = Mapping[Key, QuantizationSpec]
"""How tensors are quantized."""
RANKS = ("all", "weighted", "type", "pattern", "path", "name", "exclude", "cache")
"""How specific a selector is, weakest first: a rule of a higher rank overrides others, field by
field.
"""
_Value = TypeVar("_Value")
_ENTRIES = ("input", "quant_stub")
"""Operators whose output is the network's input in the words of a config."""


def output_role(node: Node) -> str:
    """Return the role of a layer's output."""
    return "input" if is_entry(node) else "activation"


def is_entry(node: Node) -> bool:
    """Return whether a layer's output is the network's input in the words of a config."""
    return node.op in _ENTRIES


@dataclass(frozen=True)
class TensorPlan:
    """One quantized tensor.

    Attributes:
        layer, role: the layer that quantizes it, and a role of `config.roles`.
        spec: how it is quantized.
        origins: the file position of each value of `spec`, or "default".
        source: the node whose value is quantized; for parameters, the layer itself.
        members: the layers that share it.
        scales: how many scales a parameter has.
        channels: the axis, the first and the number of the source's channels that are observed;
            None for all.
    """

    layer: str
    role: str
    spec: QuantizationSpec
    origins: Mapping[str, str]
    source: str
    members: tuple[str, ...] = ()
    scales: int = 0
    channels: tuple[int, int, int] | None = None

    @property
    def place(self) -> str:
        """Return the source with its channels, which tensors that are observed together have
        in common.
        """
        if self.channels is None:
            return self.source
        axis, first, length = self.channels
        return f"{self.source}[{':, ' * axis}{first}:{first + length}]"

    @property
    def is_calibrated(self) -> bool:
        """Return whether a scale of it comes from calibration data."""
        return self.spec.has_stored_scale and not is_parameter(self.role)

    def decided(self) -> dict[str, Any]:
        """Return the entry of quant_info.json, which does not depend on the config's
        form.
        """
        row: dict[str, Any] = {"spec": self.spec.to_json()}
        others = [name for name in self.members if name != self.layer]
        if others:
            row["shared_with"] = others
        return row

    def to_json(self) -> dict[str, Any]:
        """Return the entry of plan.json, with the origin of each value."""
        row = self.decided()
        if self.place != self.layer:
            row["source"] = self.place
        row["origins"] = {name: _portable(origin) for name, origin in self.origins.items()}
        return row


@dataclass(frozen=True)
class JoinPlan:
    """A join that products read. Calibration decides whether its parts share one scale or keep
    their own.

    The plan contains the tensors of both ways, until calibration drops those of one.

    Attributes:
        name: the layer that joins.
        single: the tensor at the join; None if nothing is quantized there.
        sources: the tensors of its parts.
        alone: those of `sources` that nothing else reads.
        observed: those of `sources` that exist only for this decision.
        inputs: the whole, quantized again for each layer that multiplies it.
        divisible: those of `inputs` whose layer can multiply each part on its own scale.
        scalable: the layers whose weights can undo a factor on each part.
        is_returned: whether the network returns some of it.
        is_single: whether the config asks for one scale, or the device allows nothing else.
        parts: by layer that multiplies the join with a weight, which of `sources` each run of
            its input channels comes from, and the run's length; None for constants.
    """

    name: str
    single: Key | None
    sources: tuple[Key, ...]
    alone: tuple[Key, ...]
    observed: tuple[Key, ...]
    inputs: tuple[Key, ...]
    divisible: tuple[Key, ...]
    scalable: tuple[str, ...]
    is_returned: bool
    is_single: bool = False
    parts: Mapping[str, PartRuns] = field(default_factory=dict)

    @property
    def is_of_channels(self) -> bool:
        """Return whether its parts are channels of an operator's output, so that they cannot
        be quantized before it.
        """
        return any(is_of_channels(role) for _, role in self.sources)


def part_name(key: Key) -> str:
    """Return the name of a part of a join: the layer that computes it, or channels of that.

    >>> part_name(("Net/mul", "activation")), part_name(("Net/mul", "activation_4_7"))
    ('Net/mul', 'Net/mul[4:7]')
    """
    layer, role = key
    if not is_of_channels(role):
        return layer
    first, end = role.split("_")[1:]
    return f"{layer}[{first}:{end}]"


@dataclass(frozen=True)
class JoinDecision:
    """The decision of calibration on how a join is quantized.

    Attributes:
        join: the join.
        scale: "one" for all parts, "own" for each, or "scaled": one for parts that are brought
            to one range first.
        gains: by layer that multiplies the join, the weight of each part's error in its output.
        lost_bits: by layer, how many bits its values would lose on the scale of the whole.
        lost_db: how much one scale increases the error of the products of the join, at most.
        left: the tensors that were observed for this decision and are not quantized after it.
    """

    join: JoinPlan
    scale: str
    gains: Mapping[str, Mapping[str, float]]
    lost_bits: Mapping[str, float]
    lost_db: float
    left: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Match:
    """The layers that a selector matches.

    Attributes:
        layers: their names.
        rank: how specific the selector is, an index into `RANKS`.
        note: what the selector was read as, if it was not taken literally.
        absorbed: matched layers that were folded into others.
        keys: for a selector of the key-value cache, the inputs of attentions that it selects.
        named: for such a selector, the layers that it names.
    """

    layers: tuple[str, ...]
    rank: int
    note: str | None = None
    absorbed: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleMatch:
    """The layers that a block of the config matches. `took_effect` counts the tensors it sets a
    value for. `leaves_float` is set if it names layers to leave them in float.
    """

    label: str
    selector: str
    layers: tuple[str, ...]
    took_effect: int
    place: str = ""
    leaves_float: bool = False


@dataclass(frozen=True, repr=False)
class Plan:
    """All decisions for one graph and one config.

    Attributes:
        graph: the graph after passes.
        tensors: the quantized tensors.
        rules: what each block of the config matches.
        floats: the layers whose output stays float, and why.
        diagnostics: findings about the config.
        settings: the config's settings.
        off: the tensors set to float32, and where the config sets that.
        ungrouped: the tensors that stay float as groups do not divide them, and why.
        joins: the joins on which calibration decides.
        left: the tensors that calibration dropped.
    """

    graph: Graph
    tensors: Mapping[Key, TensorPlan]
    rules: tuple[RuleMatch, ...]
    floats: Mapping[str, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    settings: Settings = field(default_factory=Settings)
    off: Mapping[Key, str] = field(default_factory=dict)
    ungrouped: Mapping[Key, str] = field(default_factory=dict)
    joins: tuple[JoinPlan, ...] = ()
    left: Mapping[Key, TensorPlan] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Plan({len(self.tensors)} tensors of {self.graph.model})"

    @property
    def specs(self) -> TensorSpecs:
        """Return the spec of each tensor."""
        return {key: tensor.spec for key, tensor in self.tensors.items()}

    def without(self, dropped: Mapping[Key, str]) -> Plan:
        """Return the plan without the tensors `dropped`, whose values are the reasons why."""
        tensors = {key: tensor for key, tensor in self.tensors.items() if key not in dropped}
        floats = dict(self.floats)
        for (layer, role), reason in dropped.items():
            if role == "activation" or is_entry(self.graph.by_name[layer]):
                floats[layer] = reason
        return replace(self, tensors=tensors, floats=floats)

    def of_layer(self, layer: str) -> Mapping[str, TensorPlan]:
        """Return the layer's tensors by role."""
        return self._by_layer.get(layer, {})

    @cached_property
    def _by_layer(self) -> dict[str, dict[str, TensorPlan]]:
        return _by_layer(self.tensors)

    def parameter(self, key: Key) -> Tensor:
        """Return the float value of a layer's weight, bias or other parameter."""
        layer, role = key
        path = self.graph.by_name[layer].params[parameter_name(role)]
        return self.graph.tensors[path]

    @property
    def needs_data(self) -> bool:
        """Return whether calibration has to run the model, for a static range or for a mean
        output to correct by.
        """
        if self.corrected:
            return True
        return any(tensor.is_calibrated for tensor in self.tensors.values())

    @cached_property
    def corrected(self) -> tuple[str, ...]:
        """Return the layers whose bias is corrected: all that multiply by quantized weights, if
        the config asks for it.

        On the DPU, which stores a bias as a code, these are only the layers with a bias.
        """
        if not self.settings.include_bias_corr:
            return ()
        needs_bias = self.settings.target_device == "DPU"
        names = []
        for node in self.graph.nodes:
            weights = self.tensors.get((node.name, "weights"))
            if node.row.kind != "mac" or weights is None or weights.spec.dtype == "float32":
                continue
            if "bias" in node.params or not needs_bias:
                names.append(node.name)
        return tuple(names)

    def to_json(self) -> dict[str, Any]:
        """Return plan.json: rules with their matches, what passes did to parameters, then
        layers in execution order.
        """
        rules = []
        for rule in self.rules:
            rules.append(
                {
                    "rule": rule.label,
                    "selector": rule.selector,
                    "place": _portable(rule.place),
                    "layers": list(rule.layers),
                    "tensors_set": rule.took_effect,
                }
            )
        changes = []
        for change in self.graph.changes:
            changes.append(
                {
                    "pass": change.rewrite,
                    "layers": list(change.layers),
                    "amount": round(change.amount, 3),
                }
            )
        return {
            "model": self.graph.model,
            "target": {
                "device": self.settings.target_device,
                "onnx_opset_version": self.settings.onnx_opset_version,
            },
            "rules": rules,
            "changes": changes,
            "layers": self._layers_to_json(),
        }

    def _layers_to_json(self) -> list[dict[str, Any]]:
        """Return the layers of plan.json."""
        left = _by_layer(self.left)
        off = _by_layer(self.off)
        ungrouped = _by_layer(self.ungrouped)
        layers = []
        for node in self.graph.nodes:
            row: dict[str, Any] = {"name": node.name, "op": node.op}
            tensors = self.of_layer(node.name)
            if tensors:
                row["tensors"] = {role: tensor.to_json() for role, tensor in tensors.items()}
            if node.name in left:
                observed = left[node.name].items()
                row["left_by_joins"] = {role: tensor.to_json() for role, tensor in observed}
            if node.name in off:
                origins = off[node.name].items()
                row["float32"] = {role: _portable(origin) for role, origin in origins}
            if node.name in ungrouped:
                row["ungrouped"] = ungrouped[node.name]
            if node.name in self.corrected:
                row["bias_correction"] = True
            if node.name in self.floats:
                row["activation_is_float"] = self.floats[node.name]
            layers.append(row)
        return layers


def _by_layer(values: Mapping[Key, _Value]) -> dict[str, dict[str, _Value]]:
    """Return the values by layer and then by role."""
    by_layer: dict[str, dict[str, _Value]] = {}
    for (layer, role), value in values.items():
        by_layer.setdefault(layer, {})[role] = value
    return by_layer


def _portable(origin: str) -> str:
    """Return an origin without folders, so that results do not depend on the config's
    place.
    """
    return origin.rpartition("/")[2]
