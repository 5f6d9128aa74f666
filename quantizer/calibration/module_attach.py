"""Puts what a calibration found on a module tree, in place. Ties of parameters are kept where
both ends agree.
"""

from collections import Counter, defaultdict

import torch
from torch import nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.graph.ir import Graph, Node
from quantizer.graph.modules import (
    OPERATORS,
    as_planned,
    as_stored,
    is_transposed,
    key_in_module,
    parameters_of,
)
from quantizer.nn.inplace import keep_layers_called, make_quantizable
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer

Use = tuple[nn.Module, str, QuantizedTensor]
"""A layer, a role, and how its tensor in that role is to be quantized."""


def attach(model: nn.Module, graph: Graph, solution: Solution) -> None:
    """Give the layers of `model` their quantizers; parameters are quantized once.

    A tied parameter stays tied if all that hold it want the same. Else each that is quantized
    gets its own.
    """
    modules = dict(model.named_modules())
    found = [
        (graph.by_name[name], role, tensor) for (name, role), tensor in solution.tensors.items()
    ]
    uses = [(node.scope, role_in_module(node, role), tensor) for node, role, tensor in found]
    _quantize_parameters(
        model, [(modules[path], role, each) for path, role, each in uses if is_parameter(role)]
    )
    for path, role, tensor in uses:
        put(modules[path], path, role, tensor)
    keep_layers_called(model)


def role_in_module(node: Node, role: str) -> str:
    """The role of a node's tensor among those of its module, which may have more layers."""
    return (
        parameter_role(key_in_module(node, parameter_name(role)))
        if is_parameter(role)
        else role
    )


def put(module: nn.Module, path: str, role: str, tensor: QuantizedTensor) -> None:
    """A quantizer in a role of the module at `path`; one of a parameter only says what was done
    to it.
    """
    layer = make_quantizable(module, path)
    # The output of torch's own layers is fresh memory, which a quantizer may overwrite.
    inplace = role == "activation" and layer.float_class in OPERATORS
    quantizer = TensorQuantizer.of(tensor, inplace=inplace)
    parameter = next(layer.parameters(), None)
    layer.quantizers[role] = (
        quantizer if parameter is None or parameter.is_meta else quantizer.to(parameter.device)
    )


def _quantize_parameters(model: nn.Module, uses: list[Use]) -> None:
    holders = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    wishes: dict[int, list[tuple[QuantizationSpec, bool]]] = defaultdict(list)
    for module, role, tensor in uses:
        wishes[id(_parameter(module, role))].append((tensor.spec, is_transposed(module)))
    agreed = {
        at for at, wish in wishes.items() if len(wish) == holders[at] and len(set(wish)) == 1
    }
    done: set[int] = set()
    for module, role, tensor in uses:
        parameter, key = _parameter(module, role), parameter_name(role)
        if id(parameter) not in agreed:
            parameter = nn.Parameter(
                parameter.detach().clone(), requires_grad=parameter.requires_grad
            )
            setattr(module, parameters_of(module)[key], parameter)
        if id(parameter) not in done:
            with torch.no_grad():
                quantized = TensorQuantizer.of(tensor)(as_planned(module, key, parameter.data))
                parameter.data = as_stored(module, key, quantized).contiguous()
            done.add(id(parameter))


def _parameter(module: nn.Module, role: str) -> nn.Parameter:
    return module.get_parameter(parameters_of(module)[parameter_name(role)])
