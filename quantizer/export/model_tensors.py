"""The tensors of a model of transformers by their names, as the quantized network has them.
Knows no format.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from quantizer.errors import UsageError
from quantizer.export.deployment import Deployment
from quantizer.nn.network import Network

MADE = "leave out the algorithm or the setting that makes it, or use --deploy pt2"


def values_of(
    deployment: Deployment, network: Network, coded: Collection[str], target: str
) -> dict[str, Tensor]:
    """The tensors of the model's state, with the values that parameters have in the network.

    Args:
        coded: layers whose weight is stored in another way; it keeps the model's value here.
        target: stands for the exporter in messages.

    Raises:
        UsageError: a parameter has changed that the model has no place for, or for one of its
            layers alone.
    """
    assert deployment.model is not None  # as the target has looked
    state = state_of(deployment.model)
    first, found = first_names(deployment.model), dict[str, Tensor]()
    for node in deployment.graph.nodes:
        own = network.layers[node.name].state_dict() if node.name in network.layers else {}
        for key, value in own.items():
            if key.startswith("quantizers.") or (key == "weight" and node.name in coded):
                continue
            path = node.params.get(key, f"{node.scope}.{key}")
            name, before = first.get(path, path), deployment.graph.tensors.get(path)
            value = value.detach().cpu()
            if name not in state:
                if before is None or not torch.equal(before.cpu(), value):
                    raise unheld(
                        target,
                        f"{node.name} has a {key} now that the model has no place for",
                        MADE,
                    )
            elif name in found and not torch.equal(found[name], value):
                raise unheld(
                    target, f"{name} has one value in {node.name} and another elsewhere", MADE
                )
            else:
                found[name] = value
    return state | found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state, one that has several names under the first."""
    first = first_names(model)
    state = model.state_dict()
    return {
        name: tensor.detach().cpu()
        for name, tensor in state.items()
        if first.get(name, name) == name
    }


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by all its names."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def unheld(target: str, why: str, remedy: str) -> UsageError:
    """What the file of a target has no place for."""
    return UsageError(f"--deploy {target}: {why}", help=remedy)
