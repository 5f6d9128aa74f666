"""What a checkpoint in compressed-tensors holds: the layers that are codes, the tensors that are values, its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role
from quantizer.config.wording import shortened
from quantizer.errors import UsageError
from quantizer.export.compressed_placement import Placement, place
from quantizer.export.compressed_schemes import CompressedLayer
from quantizer.export.deployment import Deployment
from quantizer.nn.network import Network
from quantizer.plan.model import Key

MIXED = "mixed-precision"
TARGET = "Linear"
"""The class that most layers have, which their group names."""


@dataclass(frozen=True)
class Checkpoint:
    """The `layers` stored as codes by their paths, the model's `tensors` by name, and the paths of all its `linears`,
    which readers would take for layers to quantize. `remarks` are for the user.
    """

    layers: Mapping[str, CompressedLayer]
    tensors: Mapping[str, Tensor]
    linears: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def stored(self) -> dict[str, Tensor]:
        """What its files hold, by name."""
        codes = {
            f"{path}.{part}": tensor for path, layer in self.layers.items() for part, tensor in layer.tensors().items()
        }
        return {name: tensor for name, tensor in self.tensors.items() if name not in self._weights} | codes

    @property
    def is_weight_only(self) -> bool:
        """Whether all inputs stay float."""
        return all(layer.input is None for layer in self.layers.values())

    @property
    def _weights(self) -> set[str]:
        return {f"{path}.weight" for path in self.layers}

    @property
    def schemes(self) -> list[tuple[dict[str, Any], list[str]]]:
        """The ways in which layers are quantized, each with its layers, the most frequent first."""
        found: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for path, layer in self.layers.items():
            found.setdefault(repr(layer.scheme), (layer.scheme, []))[1].append(path)
        return sorted(found.values(), key=lambda row: -len(row[1]))

    def quantization_config(self) -> dict[str, Any]:
        """For config.json: no layer is in two groups, as readers disagree on which of them counts.

        The status must be "compressed": with any other, transformers loads random weights and says nothing. Each group
        has its format, as readers guess it otherwise.
        """
        groups = {
            f"group_{number}": scheme | {"targets": [TARGET] if number == 0 else sorted(paths)}
            for number, (scheme, paths) in enumerate(self.schemes)
        }
        formats = {scheme["format"] for scheme, _ in self.schemes}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "config_groups": groups,
            "ignore": sorted(path for path in self.linears if path not in self.layers),
        }


def of_network(deployment: Deployment) -> Checkpoint:
    """The checkpoint of a traced model.

    Raises:
        UsageError: algorithms or passes changed what the model has no place for, or a weight has no codes.
    """
    assert deployment.model is not None  # as the target has looked
    graph, solution = deployment.graph, deployment.encoded
    placement, network = place(graph, solution.specs), deployment.network()
    layers: dict[str, CompressedLayer] = {}
    for name, node in placement.linears.items():
        weight = solution.tensors[name, "weights"]
        if weight.codes is None:
            raise _unheld(f"no codes give the weight of {name} back exactly", "quantize it with another scale_type")
        key = placement.inputs.get(name)
        made = CompressedLayer(weight, None if key is None else solution.tensors[key])
        if node.scope in layers and not _equal(layers[node.scope], made):
            raise _unheld(f"{name} has other codes than another call of its module", "leave it out of the algorithms")
        layers[node.scope] = made
    tensors = state_of(deployment.model)
    changed = _changed(deployment, placement, network, tensors)
    return Checkpoint(layers, tensors | changed, linears_of(deployment.model), remarks(solution.specs, placement))


def remarks(specs: Mapping[Key, QuantizationSpec], placement: Placement) -> tuple[str, ...]:
    """A sentence on layers whose quantized weights are no codes, if there are any."""
    weights = {layer: spec for (layer, role), spec in specs.items() if base_role(role) == "weights"}
    valued = [layer for layer, spec in weights.items() if spec.is_scaled and layer not in placement.linears]
    return (f"in float, with the values of their codes: {shortened(valued)}",) if valued else ()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state, one that has several names under the first."""
    first = first_names(model)
    state = model.state_dict()
    return {name: tensor.detach().cpu() for name, tensor in state.items() if first.get(name, name) == name}


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by all its names."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def linears_of(model: nn.Module) -> tuple[str, ...]:
    """The paths of all linear modules."""
    return tuple(path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear))


def _changed(
    deployment: Deployment, placement: Placement, network: Network, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The values of all parameters that the network has, by their names in the model."""
    assert deployment.model is not None
    first, found = first_names(deployment.model), dict[str, Tensor]()
    for node in deployment.graph.nodes:
        own = network.layers[node.name].state_dict() if node.name in network.layers else {}
        for key, value in own.items():
            if key.startswith("quantizers.") or (key == "weight" and node.name in placement.linears):
                continue
            path = node.params.get(key, f"{node.scope}.{key}")
            name, before = first.get(path, path), deployment.graph.tensors.get(path)
            value = value.detach().cpu()
            if name not in state:
                if before is None or not torch.equal(before.cpu(), value):
                    raise _unheld(f"{node.name} has a {key} now that the model has no place for", _MADE)
            elif name in found and not torch.equal(found[name], value):
                raise _unheld(f"{name} has one value in {node.name} and another elsewhere", _MADE)
            else:
                found[name] = value
    return found


def _equal(one: CompressedLayer, other: CompressedLayer) -> bool:
    """Whether two calls of a module are quantized alike."""
    found, expected = other.tensors(), one.tensors()
    return one.scheme == other.scheme and all(torch.equal(found[name], value) for name, value in expected.items())


_MADE = "leave out the algorithm or the setting that makes it, or use --deploy pt2"


def _unheld(why: str, remedy: str) -> UsageError:
    return UsageError(f"--deploy compressed-tensors: {why}", help=remedy)
