"""Replace the parameters of a module in all of their places, and move them to a device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quantizer.graph.ir import Graph
from quantizer.storage.deferred_tensor import CPU, DeferredTensor

Module = TypeVar("Module", bound=nn.Module)

MOST_BYTES_IN_MEMORY = 1 << 27
"""What is computed from a model's matrices stays in memory if they have no more bytes."""
LEAST_BYTES_OF_VIEW = 1 << 16
"""The bytes from which a matrix counts as large."""


def replace_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors in the place of a module's parameters, also where these are shared."""
    replacements: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        before = module.get_parameter(name)
        replacements[id(before)] = nn.Parameter(tensor, requires_grad=False)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if id(parameter) in replacements:
                part._parameters[name] = replacements[id(parameter)]


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module another parameter, on the device of the one before.

    A deferred tensor on that device stays deferred.
    """
    before = module.get_parameter(name)
    if value.device != before.device:
        value = value.to(before.device)
    parameter = nn.Parameter(value.detach(), requires_grad=before.requires_grad)
    module._parameters[name] = parameter


def move_module(module: Module, device: torch.device) -> Module:
    """Move a module to a device and return it.

    Deferred parameters stay deferred: each goes there whenever it is used. So a model may be
    larger than the device's memory.
    """
    deferred: list[tuple[dict[str, Any], str, DeferredTensor]] = []
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for name, tensor in parameters.items():
            if isinstance(tensor, DeferredTensor):
                deferred.append((parameters, name, tensor))
                moved[id(tensor)] = nn.Parameter(
                    tensor.on_device(device), requires_grad=tensor.requires_grad
                )
    for parameters, name, _ in deferred:
        parameters[name] = None  # `to` would read it
    module.to(device)
    for parameters, name, tensor in deferred:
        parameters[name] = moved[id(tensor)]
    return module


@contextmanager
def without_values(module: nn.Module) -> Iterator[Mapping[str, DeferredTensor]]:
    """Replace a module's deferred parameters for a while by zeros without memory, and yield
    them.

    A trace reads only the shapes.
    """
    deferred: dict[str, DeferredTensor] = {}
    blank: dict[str, Tensor] = {}
    for name, tensor in module.named_parameters():
        if isinstance(tensor, DeferredTensor):
            deferred[name] = tensor
            zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            blank[name] = zero.expand(tensor.shape)
    replace_parameters(module, blank)
    try:
        yield deferred
    finally:
        replace_parameters(module, deferred)


def with_views(graph: Graph) -> Graph:
    """Return a graph whose matrices are deferred if they have more than `MOST_BYTES_IN_MEMORY`
    together. Otherwise return the graph as it is.

    Loading such a tensor returns the tensor of the model itself. So a large model is in memory
    once, and the rest is as for a model whose weights are in files: rounded weights and codes
    are moved to disk, and a weight is decoded when its layer computes with it.
    """
    tensors = dict(graph.tensors)
    total = 0
    for path, tensor in graph.tensors.items():
        if _is_large_matrix(tensor):
            tensors[path] = _view(tensor)
            total += tensor.nbytes
    if total <= MOST_BYTES_IN_MEMORY:
        return graph
    return graph.replaced(tensors=tensors)


def _is_large_matrix(tensor: Tensor) -> bool:
    """Return whether a tensor is a matrix of floats on the CPU that is worth a view."""
    if tensor.dim() != 2 or not tensor.is_floating_point():
        return False
    return tensor.device == CPU and tensor.nbytes >= LEAST_BYTES_OF_VIEW


def _view(tensor: Tensor) -> DeferredTensor:
    """Return a deferred tensor that loads as this one."""
    return DeferredTensor(tensor.shape, tensor.dtype, lambda: tensor, stride=tensor.stride())
