"""Parameters of a module, put in the place of others wherever they stand."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quantizer.storage.deferred_tensor import DeferredTensor

Module = TypeVar("Module", bound=nn.Module)


def replace_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put other tensors where a module has its parameters; one that stands in several places is
    replaced in all.
    """
    given = {
        id(module.get_parameter(name)): nn.Parameter(own, requires_grad=False)
        for name, own in tensors.items()
    }
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if id(parameter) in given:
                part._parameters[name] = given[id(parameter)]


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module another parameter, on the device of the one before; a deferred one stays
    where it is.
    """
    before = module.get_parameter(name)
    moved = value if value.device == before.device else value.to(before.device)
    module._parameters[name] = nn.Parameter(moved.detach(), requires_grad=before.requires_grad)


def placed(module: Module, device: torch.device) -> Module:
    """The module with its tensors on a device. Deferred ones stay so: each goes there whenever
    it is computed with, so that a model may be larger than the device's memory.
    """
    aside: list[tuple[dict[str, Any], str, DeferredTensor]] = []
    for part in module.modules():
        held: dict[str, Any] = part._parameters
        aside += [
            (held, name, each)
            for name, each in held.items()
            if isinstance(each, DeferredTensor)
        ]
    moved = {
        id(each): nn.Parameter(each.at(device), requires_grad=each.requires_grad)
        for _, _, each in aside
    }
    for home, name, _ in aside:
        home[name] = None  # torch would read it
    module.to(device)
    for home, name, each in aside:
        home[name] = moved[id(each)]
    return module


@contextmanager
def without_values(module: nn.Module) -> Iterator[Mapping[str, DeferredTensor]]:
    """A module whose deferred parameters are, for a while, tensors of one value, so that it can
    be traced; gives them.

    They have the shapes and nothing more, as a trace reads nothing else.
    """
    deferred = {
        name: each
        for name, each in module.named_parameters()
        if isinstance(each, DeferredTensor)
    }
    blank = {
        name: torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape)
        for name, each in deferred.items()
    }
    replace_parameters(module, blank)
    try:
        yield deferred
    finally:
        replace_parameters(module, deferred)
