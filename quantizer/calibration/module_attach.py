"""Applies a solution to a module tree, in place. Ties of parameters are kept where all that
share a parameter quantize it alike.
"""

from collections import Counter, defaultdict

import torch
from torch import nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.graph.ir import Graph, Node
from quantizer.graph.modules import (
    MODULE_OPERATORS,
    as_planned,
    as_stored,
    is_transposed,
    key_in_module,
    parameters_of,
)
from quantizer.nn.inplace import keep_layers_called, make_quantizable
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer

_Use = tuple[nn.Module, str, QuantizedTensor]
"""A layer, a role, and how its tensor in that role is to be quantized."""


def attach_solution(model: nn.Module, graph: Graph, solution: Solution) -> None:
    """Give the layers of `model` their quantizers, and quantize its parameters.

    A tied parameter stays tied if all layers that share it quantize it alike. Else each layer
    that quantizes it gets a copy.
    """
    modules = dict(model.named_modules())
    parameters = []
    for (name, role), tensor in solution.tensors.items():
        if is_parameter(role):
            node = graph.by_name[name]
            module = modules[node.scope]
            module_role = role_in_module(node, role)
            parameters.append((module, module_role, tensor))
    _quantize_parameters(model, parameters)
    for (name, role), tensor in solution.tensors.items():
        node = graph.by_name[name]
        path = node.scope
        module_role = role_in_module(node, role)
        put(modules[path], path, module_role, tensor)
    keep_layers_called(model)


def role_in_module(node: Node, role: str) -> str:
    """Return the role of a node's tensor in its module, which may have several layers."""
    if not is_parameter(role):
        return role
    key = key_in_module(node, parameter_name(role))
    return parameter_role(key)


def put(module: nn.Module, path: str, role: str, tensor: QuantizedTensor) -> None:
    """Give the module at `path` a quantizer in a role.

    The quantizer of a parameter only records how it was quantized.
    """
    layer = make_quantizable(module, path)
    # The output of torch's own layers is fresh memory, which a quantizer may overwrite
    inplace = role == "activation" and layer.float_class in MODULE_OPERATORS
    quantizer = TensorQuantizer.of(tensor, inplace=inplace)
    parameter = next(layer.parameters(), None)
    if parameter is not None and not parameter.is_meta:
        quantizer = quantizer.to(parameter.device)
    layer.quantizers[role] = quantizer


def _quantize_parameters(model: nn.Module, uses: list[_Use]) -> None:
    holders: Counter[int] = Counter()
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] += 1
    wishes: dict[int, list[tuple[QuantizationSpec, bool]]] = defaultdict(list)
    for module, role, tensor in uses:
        parameter = _parameter(module, role)
        wish = (tensor.spec, is_transposed(module))
        wishes[id(parameter)].append(wish)
    done = set()
    for module, role, tensor in uses:
        parameter = _parameter(module, role)
        key = parameter_name(role)
        own_wishes = wishes[id(parameter)]
        are_all_known = len(own_wishes) == holders[id(parameter)]
        are_alike = len(set(own_wishes)) == 1
        if not are_all_known or not are_alike:
            values = parameter.detach().clone()
            parameter = nn.Parameter(values, requires_grad=parameter.requires_grad)
            attribute = parameters_of(module)[key]
            setattr(module, attribute, parameter)
        elif id(parameter) in done:
            continue
        done.add(id(parameter))
        quantizer = TensorQuantizer.of(tensor)
        with torch.no_grad():
            planned = as_planned(module, key, parameter.data)
            stored = as_stored(module, key, quantizer(planned))
            parameter.data = stored.contiguous()


def _parameter(module: nn.Module, role: str) -> nn.Parameter:
    key = parameter_name(role)
    attribute = parameters_of(module)[key]
    return module.get_parameter(attribute)
