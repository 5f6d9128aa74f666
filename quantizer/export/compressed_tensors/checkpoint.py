"""What a checkpoint in compressed-tensors holds: the layers that are codes, the tensors that
are values, its config.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role
from quantizer.config.wording import shortened
from quantizer.export.compressed_tensors.experts import Mixture, targets
from quantizer.export.compressed_tensors.placement import Placement, place
from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.export.deployment import Deployment
from quantizer.export.model_tensors import unheld, values_of
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key

NAME = "compressed-tensors"
MIXED = "mixed-precision"
TARGET = "Linear"
"""The class that most layers have, which their group names."""


@dataclass(frozen=True)
class Checkpoint:
    """The `layers` stored as codes by their paths, the model's `tensors` by name, and the paths
    of all its `linears`, which readers would take for layers to quantize. `remarks` are for the
    user.
    """

    layers: Mapping[str, CompressedLayer]
    tensors: Mapping[str, Tensor]
    linears: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def stored(self) -> dict[str, Tensor]:
        """What its files hold, by name."""
        codes = {
            f"{path}.{part}": tensor
            for path, layer in self.layers.items()
            for part, tensor in layer.tensors().items()
        }
        return {
            name: tensor for name, tensor in self.tensors.items() if name not in self._weights
        } | codes

    @property
    def is_weight_only(self) -> bool:
        """Whether all inputs stay float."""
        return all(layer.input is None for layer in self.layers.values())

    @property
    def _weights(self) -> set[str]:
        return {f"{path}.weight" for path in self.layers}

    @property
    def schemes(self) -> list[tuple[dict[str, Any], list[str]]]:
        """The ways in which layers are quantized, each with its layers, the most frequent
        first.
        """
        found: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for path, layer in self.layers.items():
            found.setdefault(repr(layer.scheme), (layer.scheme, []))[1].append(path)
        return sorted(found.values(), key=lambda row: -len(row[1]))

    def quantization_config(self) -> dict[str, Any]:
        """For config.json: no layer is in two groups, as readers disagree on which of them
        counts.

        The status must be "compressed": with any other, transformers loads random weights and
        says nothing. Each group has its format, as readers guess it otherwise.
        """
        groups = {
            f"group_{number}": scheme | {"targets": [TARGET] if number == 0 else targets(paths)}
            for number, (scheme, paths) in enumerate(self.schemes)
        }
        formats = {scheme["format"] for scheme, _ in self.schemes}
        return {
            "quant_method": NAME,
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "config_groups": groups,
            "ignore": sorted(path for path in self.linears if path not in self.layers),
        }


def of_network(deployment: Deployment) -> Checkpoint:
    """The checkpoint of a traced model.

    Raises:
        UsageError: algorithms or passes changed what the model has no place for, or a weight
            has no codes.
    """
    assert deployment.model is not None  # as the target has looked
    graph, solution = deployment.graph, deployment.encoded
    placement, network = place(graph, solution.specs), deployment.network()
    layers: dict[str, CompressedLayer] = {}
    for name, node in placement.linears.items():
        weight = solution.tensors[name, "weights"]
        if weight.codes is None:
            raise unheld(
                NAME,
                f"no codes give the weight of {name} back exactly",
                "quantize it with another scale_type",
            )
        key = placement.inputs.get(name)
        made = CompressedLayer(weight, None if key is None else solution.tensors[key])
        if node.scope in layers and not _equal(layers[node.scope], made):
            raise unheld(
                NAME,
                f"{name} has other codes than another call of its module",
                "leave it out of the algorithms",
            )
        layers[node.scope] = made
    stacks = {
        node.params["weight"].partition("@")[0]: solution.tensors[name, "weights"]
        for name, node in placement.experts.items()
    }
    tensors = values_of(deployment, network, {*placement.linears, *placement.experts}, NAME)
    found = Checkpoint(
        layers, tensors, linears_of(deployment.model), remarks(solution.specs, placement)
    )
    return with_experts(found, deployment.model, stacks)


def with_experts(
    found: Checkpoint, model: nn.Module, stacks: Mapping[str, QuantizedTensor]
) -> Checkpoint:
    """The checkpoint of a mixture, by the names that files have; `stacks` are quantized tensors
    of experts by path.

    Without any, and for those in float, names are the model's, as readers do not look for codes
    there.

    Raises:
        UsageError: the format has no layout for the experts of this model.
    """
    mixture = Mixture(model)
    if not stacks:
        return found
    layers = {mixture.path(path): layer for path, layer in found.layers.items()}
    experts = dict[str, CompressedLayer]()
    for path, stack in stacks.items():
        if stack.codes is None:
            raise unheld(
                NAME,
                f"no codes give the weight of {path} back exactly",
                "quantize it with another scale_type",
            )
        experts |= mixture.parts(path, stack)
    if len({repr(layer.scheme) for layer in experts.values()}) > 1:
        remedy = "choose a group_size that is less than all their inputs"
        raise unheld(
            NAME, "its experts have groups in some layers and whole rows in others", remedy
        )
    tensors = mixture.beside(
        {name: tensor for name, tensor in found.tensors.items() if name not in stacks}
    )
    linears = {*found.linears, *map(mixture.path, found.linears), *mixture.routers()}
    return replace(
        found, layers=layers | experts, tensors=tensors, linears=tuple(sorted(linears))
    )


def remarks(specs: Mapping[Key, QuantizationSpec], placement: Placement) -> tuple[str, ...]:
    """A sentence on layers whose quantized weights are no codes, if there are any."""
    weights = {
        layer: spec for (layer, role), spec in specs.items() if base_role(role) == "weights"
    }
    coded = {*placement.linears, *placement.experts}
    valued = [layer for layer, spec in weights.items() if spec.is_scaled and layer not in coded]
    return (f"in float, with the values of their codes: {shortened(valued)}",) if valued else ()


def linears_of(model: nn.Module) -> tuple[str, ...]:
    """The paths of all linear modules."""
    return tuple(
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    )


def _equal(one: CompressedLayer, other: CompressedLayer) -> bool:
    """Whether two calls of a module are quantized alike."""
    found, expected = other.tensors(), one.tensors()
    return one.scheme == other.scheme and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )
