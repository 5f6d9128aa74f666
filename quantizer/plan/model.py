"""The plan: for each (layer, role) one spec and where its values came from; for the rest, why
it stays float.
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
from quantizer.graph.ir import Graph

Key = tuple[str, str]
"""A layer and a role, which together name one tensor."""
T = TypeVar("T")
Span = tuple[int, int, int]
"""Some channels of a value: the axis, the first of them, and how many."""
ENTRIES = ("input", "quant_stub")
"""Operators whose output is what a config calls the network's input."""


@dataclass(frozen=True)
class TensorPlan:
    """One quantized tensor; its `role` is one of `config.roles`.

    `source` is the node whose value is quantized (for parameters, the layer itself), `members`
    the layers that share it, `origins` the file position of each value of `spec`, or "default",
    `scales` how many scales a parameter has. `channels` are those of the source that are looked
    at; None for all.
    """

    layer: str
    role: str
    spec: QuantizationSpec
    origins: Mapping[str, str]
    source: str
    members: tuple[str, ...] = ()
    scales: int = 0
    channels: Span | None = None

    @property
    def place(self) -> str:
        """The source, with the channels of it: what tensors that are observed together have in
        common.
        """
        if self.channels is None:
            return self.source
        axis, first, length = self.channels
        return f"{self.source}[{':, ' * axis}{first}:{first + length}]"

    @property
    def is_calibrated(self) -> bool:
        """Whether its scale is found on calibration data and then stays."""
        return self.spec.is_scaled and not self.spec.is_dynamic and not is_parameter(self.role)

    def decided(self) -> dict[str, Any]:
        """For quant_info.json: what was decided, whatever file said so."""
        row: dict[str, Any] = {"spec": self.spec.to_json()}
        others = [name for name in self.members if name != self.layer]
        return row | {"shared_with": others} if others else row

    def to_json(self) -> dict[str, Any]:
        """For plan.json: what was decided, and where each value comes from."""
        elsewhere = {"source": self.place} if self.place != self.layer else {}
        return (
            self.decided()
            | elsewhere
            | {"origins": {k: _portable(v) for k, v in self.origins.items()}}
        )


@dataclass(frozen=True)
class JoinPlan:
    """A join that products read, whose parts share one scale or keep their own: calibration
    decides.

    The plan holds the tensors of both ways, of which those of one are left.

    Attributes:
        name: the layer that joins.
        single: the tensor at the join; None where nothing is quantized there.
        sources: the tensors of its parts.
        alone: those of `sources` that nothing else reads.
        observed: those of `sources` that are there for this decision alone.
        inputs: the whole, quantized again for each layer that multiplies it.
        divisible: those of `inputs` whose layer can multiply each part on its own scale.
        scalable: the layers whose weights can take back what each part is multiplied with.
        is_returned: whether the network returns some of it.
        is_single: whether the config asks for one scale, or the device has no other way.
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
    parts: Mapping[str, tuple[tuple[Key | None, int], ...]] = field(default_factory=dict)

    @property
    def is_of_channels(self) -> bool:
        """Whether its parts are channels of what an operator computes, and so cannot be
        quantized before it.
        """
        return any(is_of_channels(role) for _, role in self.sources)


def part_name(key: Key) -> str:
    """Return what a part of a join is called: the layer that makes it, or channels of that.

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
    """How calibration has decided that a join is quantized.

    Attributes:
        join: what was to be decided.
        scale: "one" for all parts, "own" for each, or "scaled": one for parts that are brought
            to one range first.
        gains: by layer that multiplies the join, how much the error of each part weighs in its
            output.
        lost_bits: by layer, how many bits its values would lose on the scale of the whole.
        lost_db: how much larger the error of what multiplies the join is with one scale, at
            worst.
        left: the tensors that were observed for this decision and are not quantized after it.
    """

    join: JoinPlan
    scale: str
    gains: Mapping[str, Mapping[str, float]]
    lost_bits: Mapping[str, float]
    lost_db: float
    left: tuple[Key, ...] = ()


@dataclass(frozen=True)
class RuleMatch:
    """How many layers a block of the config found; `took_effect` counts the tensors it sets a
    value for.
    """

    label: str
    selector: str
    layers: tuple[str, ...]
    took_effect: int
    place: str = ""


@dataclass(frozen=True)
class Plan:
    """All decisions for one graph and one config; `off` are the tensors set to float32, and
    where that is said, `ungrouped` those that stay float as groups do not fit them, and why;
    `joins` are open until calibration, and `left` the tensors that it then does without.
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

    def without(self, dropped: Mapping[Key, str]) -> Plan:
        """Return the plan without tensors of joins that are decided, and why each layer's
        output stays float.
        """
        tensors = {key: tensor for key, tensor in self.tensors.items() if key not in dropped}
        floats = dict(self.floats)
        for (layer, role), why in dropped.items():
            if role == "activation" or self.graph.by_name[layer].op in ENTRIES:
                floats[layer] = why
        return replace(self, tensors=tensors, floats=floats)

    def of_layer(self, layer: str) -> Mapping[str, TensorPlan]:
        """The layer's tensors by role."""
        return self._by_layer.get(layer, {})

    @cached_property
    def _by_layer(self) -> dict[str, dict[str, TensorPlan]]:
        return _by_layer(self.tensors)

    def parameter(self, key: Key) -> Tensor:
        """The float value of a layer's weight, bias or other parameter."""
        layer, role = key
        return self.graph.tensors[self.graph.by_name[layer].params[parameter_name(role)]]

    @property
    def needs_data(self) -> bool:
        """Whether calibration has to run the model: to find a range that stays, or a mean
        output to correct by.
        """
        return bool(self.corrected) or any(
            tensor.is_calibrated for tensor in self.tensors.values()
        )

    @cached_property
    def corrected(self) -> tuple[str, ...]:
        """Layers whose bias is corrected: all that multiply by quantized weights, if the config
        asks for it.

        On the DPU, which stores a bias as a code, only those that have one.
        """
        if not self.settings.include_bias_corr:
            return ()
        as_codes = self.settings.target_device == "DPU"
        weights = {
            layer: tensor for (layer, role), tensor in self.tensors.items() if role == "weights"
        }
        return tuple(
            node.name
            for node in self.graph.nodes
            if node.row.kind == "mac"
            and node.name in weights
            and weights[node.name].spec.dtype != "float32"
            if "bias" in node.params or not as_codes
        )

    def to_json(self) -> dict[str, Any]:
        """plan.json: rules with their matches, what passes did to parameters, then layers in
        execution order.
        """
        layers, off, ungrouped = [], _by_layer(self.off), _by_layer(self.ungrouped)
        for node in self.graph.nodes:
            row: dict[str, Any] = {"name": node.name, "op": node.op}
            tensors = self.of_layer(node.name)
            if tensors:
                row["tensors"] = {role: tensor.to_json() for role, tensor in tensors.items()}
            observed = {
                role: tensor.to_json()
                for (layer, role), tensor in self.left.items()
                if layer == node.name
            }
            if observed:
                row["left_by_joins"] = observed
            if node.name in off:
                row["float32"] = {
                    role: _portable(origin) for role, origin in off[node.name].items()
                }
            if node.name in ungrouped:
                row["ungrouped"] = ungrouped[node.name]
            if node.name in self.corrected:
                row["bias_correction"] = True
            if node.name in self.floats:
                row["activation_is_float"] = self.floats[node.name]
            layers.append(row)
        rules = [
            {
                "rule": r.label,
                "selector": r.selector,
                "place": _portable(r.place),
                "layers": list(r.layers),
                "tensors_set": r.took_effect,
            }
            for r in self.rules
        ]
        target = {
            "device": self.settings.target_device,
            "onnx_opset_version": self.settings.onnx_opset_version,
        }
        changes = [
            {
                "pass": change.rewrite,
                "layers": list(change.layers),
                "amount": round(change.amount, 3),
            }
            for change in self.graph.changes
        ]
        return {
            "model": self.graph.model,
            "target": target,
            "rules": rules,
            "changes": changes,
            "layers": layers,
        }


def _by_layer(values: Mapping[Key, T]) -> dict[str, dict[str, T]]:
    """What keys of layer and role name, by layer and then by role."""
    found: dict[str, dict[str, T]] = {}
    for (layer, role), value in values.items():
        found.setdefault(layer, {})[role] = value
    return found


def _portable(origin: str) -> str:
    """An origin without folders, so that results do not depend on where the config lay."""
    return origin.rpartition("/")[2]
