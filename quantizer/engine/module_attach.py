"""Puts what a calibration found on a module tree, in place. Ties of parameters are kept where both ends agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.solution import Solution
from quantizer.graph.ir import Graph
from quantizer.graph.modules import OPERATORS, as_planned, is_transposed, parameters_of
from quantizer.nn.inplace import InPlace, keep_layers_called, make_quantizable
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer


@dataclass(frozen=True)
class _Use:
    """One layer's claim on a parameter: how it is to be quantized."""

    layer: str
    module: nn.Module
    key: str
    role: str
    spec: QuantizationSpec

    @property
    def attribute(self) -> str:
        return parameters_of(self.module)[self.key]

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter(self.attribute)


def attach(model: nn.Module, graph: Graph, solution: Solution) -> None:
    """Give the layers of `model` their quantizers; parameters are quantized once.

    A tied parameter stays tied if all that hold it want the same. Else each that is quantized gets its own.
    """
    modules = dict(model.named_modules())
    uses = list(_uses(modules, graph, solution))
    quantizers = {
        key: quantizer_of(modules[graph.by_name[key[0]].scope], key[1], tensor)
        for key, tensor in solution.tensors.items()
    }
    done: set[int] = set()
    agreed = _agreed(model, uses)
    for use in uses:
        if id(use.parameter) not in agreed:
            own = nn.Parameter(use.parameter.detach().clone(), requires_grad=use.parameter.requires_grad)
            setattr(use.module, use.attribute, own)
        if id(use.parameter) not in done:
            _quantize(use, quantizers[use.layer, use.role])
            done.add(id(use.parameter))
    for (name, role), quantizer in quantizers.items():
        path = graph.by_name[name].scope
        put(modules[path], path, role, quantizer)
    keep_layers_called(model)


def put(module: nn.Module, path: str, role: str, quantizer: TensorQuantizer) -> None:
    """A quantizer in its role; one of a parameter only says what was done to it."""
    layer = make_quantizable(module, path)
    if role == "activation":
        layer.attach(role, quantizer)
    else:
        layer.quantizers[role] = quantizer


def quantizer_of(module: nn.Module, role: str, tensor: QuantizedTensor) -> TensorQuantizer:
    """A quantizer for a layer's tensor; the output of torch's own layers is fresh memory, which it may overwrite."""
    cls = module.float_class if isinstance(module, InPlace) else type(module)
    inplace = role == "activation" and cls in OPERATORS
    return TensorQuantizer.of(tensor, inplace=inplace)


def _uses(modules: dict[str, nn.Module], graph: Graph, solution: Solution) -> Iterator[_Use]:
    for (name, role), tensor in solution.tensors.items():
        if is_parameter(role):
            yield _Use(name, modules[graph.by_name[name].scope], parameter_name(role), role, tensor.spec)


def _agreed(model: nn.Module, uses: list[_Use]) -> set[int]:
    """The parameters, by id, of which all modules that hold them want the same."""
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    wishes: dict[int, list[tuple[QuantizationSpec, bool]]] = {}
    for use in uses:
        wishes.setdefault(id(use.parameter), []).append((use.spec, is_transposed(use.module)))
    return {at for at, wish in wishes.items() if len(wish) == holders[at] and len(set(wish)) == 1}


def _quantize(use: _Use, quantizer: TensorQuantizer) -> None:
    with torch.no_grad():
        planned = as_planned(use.module, use.key, use.parameter.data)
        use.parameter.data = as_planned(use.module, use.key, quantizer(planned)).contiguous()
