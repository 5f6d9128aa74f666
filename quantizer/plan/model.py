"""The plan: for each (layer, role) one spec and where its values came from; for the rest, why it stays float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import QuantizationSpec, Settings
from quantizer.graph.ir import Graph


@dataclass(frozen=True)
class TensorPlan:
    """One quantized tensor; its `role` is one of `config.roles`.

    `source` is the node whose value is quantized (for parameters, the layer itself), `members` the layers that share
    it,
    `origins` the file position of each value of `spec`, or "default".
    """

    layer: str
    role: str
    spec: QuantizationSpec
    origins: Mapping[str, str]
    source: str
    members: tuple[str, ...] = ()
    channels: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For plan.json and quant_info.json."""
        row: dict[str, Any] = {
            "spec": self.spec.to_json(),
            "origins": {k: _portable(v) for k, v in self.origins.items()},
        }
        others = [name for name in self.members if name != self.layer]
        return row | {"shared_with": others} if others else row


@dataclass(frozen=True)
class RuleMatch:
    """How many layers a block of the config found; `took_effect` counts the tensors it sets a value for."""

    label: str
    selector: str
    layers: tuple[str, ...]
    took_effect: int
    place: str = ""


@dataclass(frozen=True)
class Plan:
    """All decisions for one graph and one config."""

    graph: Graph
    tensors: Mapping[tuple[str, str], TensorPlan]
    rules: tuple[RuleMatch, ...]
    floats: Mapping[str, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    settings: Settings = field(default_factory=Settings)

    def of_layer(self, layer: str) -> dict[str, TensorPlan]:
        """The layer's tensors by role."""
        return {role: tensor for (name, role), tensor in self.tensors.items() if name == layer}

    @cached_property
    def corrected(self) -> tuple[str, ...]:
        """Layers whose bias is corrected: all that multiply by quantized weights, if the config asks for it.

        On the DPU, which stores a bias as a code on its grid, only those that have one.
        """
        if not self.settings.include_bias_corr:
            return ()
        on_grid = self.settings.target_device == "DPU"
        weights = {layer: tensor for (layer, role), tensor in self.tensors.items() if role == "weights"}
        return tuple(
            node.name
            for node in self.graph.nodes
            if node.row.kind == "mac" and node.name in weights and weights[node.name].spec.dtype != "float32"
            if "bias" in node.params or not on_grid
        )

    def to_json(self) -> dict[str, Any]:
        """plan.json: rules with their matches, what passes did to parameters, then layers in execution order."""
        layers = []
        for node in self.graph.nodes:
            row: dict[str, Any] = {"name": node.name, "op": node.op}
            tensors = self.of_layer(node.name)
            if tensors:
                row["tensors"] = {role: tensor.to_json() for role, tensor in tensors.items()}
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
        target = {"device": self.settings.target_device, "onnx_opset_version": self.settings.onnx_opset_version}
        changes = [
            {"pass": change.rewrite, "layers": list(change.layers), "amount": round(change.amount, 3)}
            for change in self.graph.changes
        ]
        return {"model": self.graph.model, "target": target, "rules": rules, "changes": changes, "layers": layers}


def _portable(origin: str) -> str:
    """An origin without folders, so that results do not depend on where the config lay."""
    return origin.rpartition("/")[2]
