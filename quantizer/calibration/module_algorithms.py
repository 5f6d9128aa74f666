"""The config's algorithms on a module tree: they run on a trace of it, and what they find is
written back by path.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from quantizer.algorithms.adjustment import Adjustment, Rounded, adjusted
from quantizer.config.model import Algorithm, QuantizationSpec
from quantizer.errors import ModelError
from quantizer.graph.ir import Graph
from quantizer.graph.modules import is_called, key_in_module, parameters_of
from quantizer.graph.passes import load_pass
from quantizer.graph.passes.linear_from_matmul import TRANSPOSED
from quantizer.graph.structure import Structure
from quantizer.graph.trace import trace
from quantizer.nn.inplace import add_bias, insert_before, lacks_bias
from quantizer.nn.network import build_layer
from quantizer.plan.model import Key, Plan
from quantizer.sources.batches import Batch
from quantizer.sources.hugging_face import without_cache

logger = logging.getLogger(__name__)

PASSES = ("remove_dropout", "linear_from_matmul", "linear_of_experts")
"""Those that leave each parameter in its module."""


@dataclass(frozen=True)
class Home:
    """Where a parameter lives: a module's path, its attribute, whether a graph has it
    transposed, and of how many experts, one below the other.
    """

    path: str
    attribute: str
    is_transposed: bool = False
    experts: int = 0

    def stored(self, value: Tensor) -> Tensor:
        """A value as the module has it."""
        value = value.reshape(self.experts, -1, value.shape[1]) if self.experts else value
        return value.mT if self.is_transposed else value


@dataclass(frozen=True)
class TracedModules:
    """A model, its trace, and the plan's layer for each node of the trace that multiplies by
    its weight.
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
        try:
            with without_cache(model):
                graph = trace(model, first.args, first.kwargs)
        except ModelError as error:
            raise ModelError(f"{reason}: {error.message}", help=error.help or remedy) from error
        for name in PASSES:
            graph = load_pass(name)(graph)
        return cls(model, graph, plan)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """By path."""
        return dict(self.model.named_modules())

    @cached_property
    def homes(self) -> dict[tuple[str, str], Home]:
        """Of each parameter of the graph, by node and key; a tied one lives in the module that
        reads it.
        """
        known = dict(self.model.named_parameters(remove_duplicate=False))
        found = {}
        for node in self.graph.nodes:
            for key, name in node.params.items():
                path, *changes = name.split("@")
                if path in known:
                    own = (
                        self.modules[node.scope]._parameters.items()
                        if node.scope in self.modules
                        else ()
                    )
                    attribute = next(
                        (attribute for attribute, value in own if value is known[path]), None
                    )
                    home = (
                        (node.scope, attribute)
                        if attribute
                        else (path.rpartition(".")[0], path.rpartition(".")[2])
                    )
                    experts = node.attrs["groups"] if node.row.experts else 0
                    found[node.name, key] = Home(*home, TRANSPOSED[1:] in changes, experts)
        return found

    @cached_property
    def shared(self) -> set[str]:
        """Nodes with a parameter that another node takes from the same place: a module that is
        called twice.
        """
        uses = Counter(self.homes.values())
        return {name for (name, _), home in self.homes.items() if uses[home] > 1}

    def module_of(self, name: str) -> nn.Module | None:
        """The module whose weight a layer multiplies, if it is that module's forward that
        does.
        """
        home = self.homes.get((name, "weight"))
        module = self.modules.get(home.path) if home else None
        if (
            home is None
            or module is None
            or parameters_of(module).get("weight") != home.attribute
        ):
            return None
        return (
            module
            if is_called(module) and home.path == self.graph.by_name[name].scope
            else None
        )

    @cached_property
    def names(self) -> dict[str, str]:
        """The plan's layer for each node of the trace that multiplies by its weight."""
        layers = [node for node in self.plan.graph.nodes if node.params]
        owned = {node.name: parameters_of(self.modules[node.scope]) for node in layers}
        owners = {
            (n.scope, owned[n.name].get(key_in_module(n, "weight"))): n.name for n in layers
        }
        found = {}
        for node in self.graph.nodes:
            home = self.homes.get((node.name, "weight"))
            if (
                node.row.weight
                and node.op != "parameter"
                and home
                and (home.path, home.attribute) in owners
            ):
                found[node.name] = owners[home.path, home.attribute]
        return found

    @property
    def specs(self) -> dict[Key, QuantizationSpec]:
        """Of the plan, by nodes of the trace."""
        layers = self.names.items()
        return {
            (node, role): t.spec
            for node, name in layers
            for role, t in self.plan.of_layer(name).items()
        }

    def fitting(self, algorithm: Algorithm, structure: Structure) -> Structure:
        """The structure without what cannot be done to modules."""
        groups, again = [], set[Home]()
        for group in structure.groups:
            if self.shared.intersection(group.layers):
                again |= {
                    self.homes[name, "weight"] for name in group.layers if name in self.shared
                }
                continue
            fold = group.fold
            if fold is not None and self.shared & {fold.node, *fold.extra}:
                group = replace(group, fold=None, why_not=f"{fold.node} runs more than once")
            takes_insertions = all(self.module_of(name) is not None for name in group.layers)
            if algorithm.stage == "round" or group.fold is not None or takes_insertions:
                groups.append(group)
            elif all(self.graph.by_name[name].row.experts for name in group.layers):
                # Its weights can be rounded all the same
                groups.append(replace(group, is_fixed=True))
        for home in sorted(again, key=lambda home: home.path):
            logger.warning(
                "%s runs more than once, so %s leaves it as it is", home.path, algorithm.name
            )
        return replace(structure, groups=tuple(groups))

    def write(self, found: Adjustment) -> dict[str, Rounded]:
        """Write what algorithms found into the model; returns rounded weights by layer of the
        plan.

        Weights that were rounded stand in the model as they were before that.

        Raises:
            ModelError: an algorithm changes what has no place in a module.
        """
        self._insert(found)
        self._write_parameters(found)
        written = {}
        for name, layer in found.rounded.items():
            weight = self.homes[name, "weight"].stored(layer.weight).contiguous()
            written[self.names[name]] = replace(layer, weight=weight)
        return written

    def _insert(self, found: Adjustment) -> None:
        graph = adjusted(self.graph, found)
        for row in found.insertions:
            for reader in row.readers:
                module = self.module_of(reader)
                if module is None:
                    raise ModelError(
                        f"{reader} is no layer of its own in the model, so nothing can be put "
                        "before it",
                        help="leave it out of the algorithm, or use the command line, which "
                        "quantizes the trace",
                    )
                layer = build_layer(graph, graph.by_name[row.name])
                layer.weight = nn.Parameter(row.weight.detach().clone(), requires_grad=False)
                insert_before(module, self.homes[reader, "weight"].path, layer)

    def _write_parameters(self, found: Adjustment) -> None:
        """In float; one that is tied leaves the tie, unless all that hold it change alike."""
        values: dict[Home, list[Tensor]] = defaultdict(list)
        for name, own in found.parameters.items():
            module = self.module_of(name)
            for key, tensor in own.items():
                home = self.homes.get((name, key))
                if home is not None and not (name in self.shared and values[home]):
                    values[home].append(tensor)
                elif (
                    home is None and key == "bias" and module is not None and lacks_bias(module)
                ):
                    add_bias(module, tensor)
                else:
                    raise ModelError(
                        f"{name} has no {key} of its own in the model, and an algorithm would "
                        "change it",
                        help="leave the layer out of the algorithm, or use the command line, "
                        "which quantizes the trace",
                    )
        for home, (tensor, *_) in values.items():
            if _set(self.model, home, home.stored(tensor)):
                logger.warning(
                    "%s.%s is not tied any more: an algorithm changed it",
                    home.path,
                    home.attribute,
                )


def write_rounded(
    model: nn.Module, graph: Graph, weights: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Put weights, by layer and key, into the layers of a module graph."""
    for name, own in weights.items():
        node = graph.by_name[name]
        attributes = parameters_of(model.get_submodule(node.scope))
        for key, weight in own.items():
            _set(model, Home(node.scope, attributes[key_in_module(node, key)]), weight)


def _set(model: nn.Module, home: Home, value: Tensor) -> bool:
    """Change a parameter, in its own memory no more; whether it was tied, and is a parameter of
    its own now.
    """
    module = model.get_submodule(home.path)
    parameter = module.get_parameter(home.attribute)
    holders = sum(
        value is parameter for child in model.modules() for value in child._parameters.values()
    )
    value = value.to(parameter.device, parameter.dtype).contiguous().clone()
    if holders == 1:
        parameter.data = value
    else:
        setattr(
            module, home.attribute, nn.Parameter(value, requires_grad=parameter.requires_grad)
        )
    return holders > 1
