"""Changes the modules of a model in place.

The config's algorithms run on a trace of the modules, and what they change is written back. A
solution gives layers their quantizers and quantizes their parameters.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.config.algorithms import Algorithm
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.errors import ModelError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.modules import (
    MODULE_OPERATORS,
    as_planned,
    as_stored,
    is_called,
    is_transposed,
    key_in_module,
    parameters_of,
)
from quantizer.graph.passes import load_pass
from quantizer.graph.passes.linear_layers import TRANSPOSED
from quantizer.graph.structure.definitions import Structure
from quantizer.layerwise.adjustment import Adjustment, RoundedWeight, apply_adjustment
from quantizer.nn.inplace import (
    add_bias,
    insert_before,
    keep_layers_called,
    lacks_bias,
    make_quantizable,
)
from quantizer.nn.network import build_layer
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.plan.model import Key, Plan
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import evaluating, without_cache

logger = logging.getLogger(__name__)

_PASSES = ("remove_dropout", "linear_from_matmul", "linear_of_experts")
"""The passes that leave each parameter in its module."""
_USE_SHELL = "use the command line, which quantizes the trace"


@dataclass(frozen=True)
class Home:
    """The place of a parameter in the model.

    Args:
        path: of its module.
        attribute: of the parameter in the module.
        is_transposed: whether the graph has it transposed.
        experts: of how many experts it is, which the graph has below each other; 0 for others.
    """

    path: str
    attribute: str
    is_transposed: bool = False
    experts: int = 0

    def stored(self, value: Tensor) -> Tensor:
        """Return a value of the graph's parameter in the module's layout."""
        if self.experts:
            value = value.reshape(self.experts, -1, value.shape[1])
        return value.mT if self.is_transposed else value


@dataclass(frozen=True)
class TracedModules:
    """A model and its trace.

    Args:
        model: a module tree.
        graph: its trace.
        plan: for the layers of the module tree.
    """

    model: nn.Module
    graph: Graph
    plan: Plan

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, first: Batch, *, reason: str, remedy: str
    ) -> TracedModules:
        """Trace a model on the first batch, for a `reason` that the error names.

        Raises:
            ModelError: it cannot be traced.
        """
        # It imports torch.export, and few algorithms of modules need a trace
        from quantizer.graph.tracing.trace import trace

        try:
            with evaluating(model), without_cache(model):
                graph = trace(model, first.args, first.kwargs)
        except ModelError as error:
            text = f"{reason}: {error.message.marked}"
            raise ModelError(text, help=error.help or remedy) from error
        for name in _PASSES:
            graph = load_pass(name)(graph)
        return cls(model, graph, plan)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Return all modules by path."""
        return dict(self.model.named_modules())

    @cached_property
    def homes(self) -> dict[Key, Home]:
        """Return the place of each parameter of the graph, by node and key.

        The place of a tied parameter is in the module that reads it.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        homes = {}
        for node in self.graph.nodes:
            experts = node.attrs["groups"] if node.row.experts else 0
            for key, name in node.params.items():
                path, *changes = name.split("@")
                if path not in parameters:
                    continue
                module, _, attribute = path.rpartition(".")
                local = self._attribute(node, parameters[path])
                if local:
                    module = node.scope
                    attribute = local
                homes[node.name, key] = Home(
                    module, attribute, is_transposed=TRANSPOSED[1:] in changes, experts=experts
                )
        return homes

    def _attribute(self, node: Node, parameter: nn.Parameter) -> str | None:
        """Return the name of a parameter in the module of a node; None if it has another."""
        module = self.modules.get(node.scope)
        if module is not None:
            for attribute, value in module._parameters.items():
                if value is parameter:
                    return attribute
        return None

    @cached_property
    def shared(self) -> set[str]:
        """Return the nodes with a parameter that another node reads, too: those of modules that
        are called twice.
        """
        uses = Counter(self.homes.values())
        names = set()
        for (name, _), home in self.homes.items():
            if uses[home] > 1:
                names.add(name)
        return names

    def module_of(self, name: str) -> nn.Module | None:
        """Return the module whose forward multiplies the weight of a layer; None if another
        module reads the weight.
        """
        home = self.homes.get((name, "weight"))
        if home is None or home.path != self.graph.by_name[name].scope:
            return None
        module = self.modules.get(home.path)
        if module is None or not is_called(module):
            return None
        if parameters_of(module).get("weight") != home.attribute:
            return None
        return module

    @cached_property
    def names(self) -> dict[str, str]:
        """Return the plan's layer for each node of the trace that multiplies by its weight."""
        layers = {}
        for node in self.plan.graph.nodes:
            if node.params:
                attributes = parameters_of(self.modules[node.scope])
                key = key_in_module(node, "weight")
                attribute = attributes.get(key)
                layers[node.scope, attribute] = node.name
        names = {}
        for node in self.graph.nodes:
            home = self.homes.get((node.name, "weight"))
            if home is None or not node.row.weight or node.op == "parameter":
                continue
            layer = layers.get((home.path, home.attribute))
            if layer is not None:
                names[node.name] = layer
        return names

    @property
    def specs(self) -> dict[Key, QuantizationSpec]:
        """Return the specs of the plan, by nodes of the trace."""
        specs = {}
        for node, layer in self.names.items():
            for role, tensor in self.plan.of_layer(layer).items():
                specs[node, role] = tensor.spec
        return specs

    def fitting(self, algorithm: Algorithm, structure: Structure) -> Structure:
        """Return the part of a structure that an algorithm can change in the modules."""
        groups = []
        repeated = set()
        for group in structure.groups:
            shared = self.shared.intersection(group.layers)
            if shared:
                for name in shared:
                    repeated.add(self.homes[name, "weight"].path)
                continue
            fold = group.fold
            if fold is not None and self.shared & {fold.node, *fold.extra}:
                reason = f"{fold.node} runs more than once"
                group = replace(group, fold=None, why_not=reason)
            modules = [self.module_of(name) for name in group.layers]
            takes_insertions = None not in modules
            if algorithm.stage == "round" or group.fold is not None or takes_insertions:
                groups.append(group)
            elif all(self.graph.by_name[name].row.experts for name in group.layers):
                # Its weights can be rounded, but nothing can be inserted before it
                groups.append(replace(group, is_fixed=True))
        for path in sorted(repeated):
            logger.warning(
                "%s runs more than once, so %s leaves it as it is", path, algorithm.name
            )
        return replace(structure, groups=tuple(groups))

    def write(self, adjustment: Adjustment) -> dict[str, RoundedWeight]:
        """Write what algorithms found into the model, except for rounded weights.

        Returns:
            The rounded weights by layer of the plan.

        Raises:
            ModelError: an algorithm changes what has no place in a module.
        """
        self._insert(adjustment)
        self._write_parameters(adjustment)
        rounded = {}
        for name, layer in adjustment.rounded.items():
            weight = self.homes[name, "weight"].stored(layer.weight)
            rounded[self.names[name]] = replace(layer, weight=weight.contiguous())
        return rounded

    def _insert(self, adjustment: Adjustment) -> None:
        graph = apply_adjustment(self.graph, adjustment)
        for row in adjustment.insertions:
            for reader in row.readers:
                module = self.module_of(reader)
                if module is None:
                    raise ModelError(
                        f"{reader} is not a module of the model, so no operator can be "
                        "inserted before it",
                        help=f"leave it out of the algorithm, or {_USE_SHELL}",
                    )
                layer = build_layer(graph, graph.by_name[row.name])
                weight = row.weight.detach().clone()
                layer.weight = nn.Parameter(weight, requires_grad=False)
                path = self.homes[reader, "weight"].path
                insert_before(module, path, layer)

    def _write_parameters(self, adjustment: Adjustment) -> None:
        """Write float parameters; a tied one gets a copy in its place."""
        values: dict[Home, Tensor] = {}
        for name, parameters in adjustment.parameters.items():
            module = self.module_of(name)
            for key, tensor in parameters.items():
                home = self.homes.get((name, key))
                can_add = key == "bias" and module is not None and lacks_bias(module)
                if home is not None and not (name in self.shared and home in values):
                    values.setdefault(home, tensor)
                elif home is None and can_add and module is not None:
                    add_bias(module, tensor)
                else:
                    raise ModelError(
                        f"an algorithm would change the {key} of {name}, but the model has no "
                        "parameter for it alone",
                        help=f"leave the layer out of the algorithm, or {_USE_SHELL}",
                    )
        for home, tensor in values.items():
            if _set(self.model, home, home.stored(tensor)):
                logger.warning(
                    "%s.%s is no longer tied: an algorithm changed it",
                    home.path,
                    home.attribute,
                )


def write_rounded(
    model: nn.Module, graph: Graph, weights: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write weights, by layer and key, into the layers of a module graph."""
    for name, parameters in weights.items():
        node = graph.by_name[name]
        attributes = parameters_of(model.get_submodule(node.scope))
        for key, weight in parameters.items():
            attribute = attributes[key_in_module(node, key)]
            _set(model, Home(node.scope, attribute), weight)


def _set(model: nn.Module, home: Home, value: Tensor) -> bool:
    """Replace a parameter in one place.

    Returns:
        Whether it was tied, so that the place has a parameter of its own now.
    """
    module = model.get_submodule(home.path)
    parameter = module.get_parameter(home.attribute)
    value = value.to(parameter.device, parameter.dtype).contiguous().clone()
    if _holders(model)[parameter] == 1:
        parameter.data = value
        return False
    untied = nn.Parameter(value, requires_grad=parameter.requires_grad)
    setattr(module, home.attribute, untied)
    return True


def attach_solution(model: nn.Module, graph: Graph, solution: Solution) -> None:
    """Give the layers of `model` their quantizers, and quantize its parameters."""
    _quantize_parameters(model, graph, solution)
    for (name, role), tensor in solution.tensors.items():
        node = graph.by_name[name]
        module = model.get_submodule(node.scope)
        put(module, node.scope, role_in_module(node, role), tensor)
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


def _quantize_parameters(model: nn.Module, graph: Graph, solution: Solution) -> None:
    """Quantize parameters in place.

    A tied parameter stays tied if all layers that share it quantize it alike. Else each layer
    that quantizes it gets one of its own.
    """
    holders = _holders(model)
    uses: dict[nn.Parameter, list[tuple[nn.Module, str, QuantizedTensor]]] = defaultdict(list)
    for (name, role), tensor in solution.tensors.items():
        if is_parameter(role):
            node = graph.by_name[name]
            module = model.get_submodule(node.scope)
            key = key_in_module(node, parameter_name(role))
            parameter = module.get_parameter(parameters_of(module)[key])
            uses[parameter].append((module, key, tensor))
    for parameter, of_parameter in uses.items():
        ways = {(tensor.spec, is_transposed(module)) for module, _, tensor in of_parameter}
        stays_tied = len(of_parameter) == holders[parameter] and len(ways) == 1
        before = parameter.data
        for module, key, tensor in of_parameter:
            quantizer = TensorQuantizer.of(tensor)
            with torch.no_grad():
                quantized = quantizer(as_planned(module, key, before))
            value = as_stored(module, key, quantized).contiguous()
            if stays_tied:
                parameter.data = value
                break
            own = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(module, parameters_of(module)[key], own)


def _holders(model: nn.Module) -> Counter[nn.Parameter | None]:
    """Return how many modules hold each parameter."""
    holders: Counter[nn.Parameter | None] = Counter()
    for module in model.modules():
        holders.update(module._parameters.values())
    return holders
