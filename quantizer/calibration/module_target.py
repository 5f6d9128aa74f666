"""The modules of a model in place, as the target of a calibration.

What needs a trace of the network is refused.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from quantizer.calibration.changed_modules import TracedModules, attach_solution, write_rounded
from quantizer.calibration.observing import Observable
from quantizer.calibration.solution import Solution
from quantizer.calibration.target import AlgorithmScope, Target
from quantizer.config.algorithms import SWITCHES
from quantizer.config.model import ResolvedConfig, Settings
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import counted, first_names
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.modules import module_graph, uncovered_modules
from quantizer.graph.passes import run_passes
from quantizer.layerwise.adjustment import Adjustment, RoundedWeight
from quantizer.nn.inplace import ModuleTree, check_quantizable, rectify_output
from quantizer.nn.layer import check_float
from quantizer.plan.groups import layout
from quantizer.plan.model import Plan, TensorPlan
from quantizer.plan.remarks import MUCH, group_size_remarks, left_float, share_left
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import evaluating, preserve_module_state
from quantizer.sources.tensor_kinds import check_finite

NEEDS_TRACE = {
    "include_cle": "equalizes neighbouring layers",
    "include_bias_corr": "compares the outputs of quantized layers with those of float layers",
    "convert_relu6_to_relu": "replaces operators",
    "convert_silu_to_hswish": "replaces operators",
    "integer_activations": "replaces operators",
}
"""Settings that need more than single modules, and what each does."""
_USE_TRACE = "use quantizer.calibrate, which traces the model"


@dataclass(frozen=True, kw_only=True)
class ModuleTarget(Target):
    """A model whose layers become quantized layers of the same classes.

    The target itself is immutable. The model is not: `adjusted` and `finished` change it in
    place, and the caller undoes that if a later step fails. `tree` records which layers ran.
    The graph has the layers of the model, and when changed, the parameters that algorithms have
    written.

    Args:
        model: changed in place.
        tree: the modules of the layers.
        traced: a trace of the model, where algorithms need one.
        rectified: layers whose outputs are quantized after a ReLU.
        floats: layers whose outputs stay float in a traced network, and why.
        rounded: the weights that algorithms have rounded, by layer.
    """

    model: nn.Module
    tree: ModuleTree
    traced: TracedModules | None = None
    rectified: frozenset[str] = frozenset()
    floats: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, RoundedWeight] = field(default_factory=dict)
    is_traced = False

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTarget:
        """Return the target of a model.

        Raises:
            ModelError: it is not a module, compiled, quantized already, or has layers without
                weights.
        """
        check_float(model)
        graph = module_graph(model)
        return cls(original=graph, model=model, tree=ModuleTree(model, graph))

    def prepared(
        self, config: ResolvedConfig, kept: Mapping[str, Any] | None = None
    ) -> ModuleTarget:
        """Return the target unchanged, if the config asks for nothing that needs a trace.

        Raises:
            UsageError: it does.
        """
        names = {name: name for name in NEEDS_TRACE}
        if config.form == "hierarchical":
            names |= {switch: name for name, switch in SWITCHES.items()}
        for setting, effect in NEEDS_TRACE.items():
            if getattr(config.settings, setting):
                name = names[setting]
                remedy = "set it to false" if name == setting else "remove it"
                raise _needs_trace(f"{name} {effect}", remedy)
        for rule in config.rules:
            if rule.selector.kind in ("cache", "cache_source"):
                text = (
                    f"{rule.selector.place}: kv_cache_quant_config quantizes keys and values "
                    "of attentions"
                )
                raise _needs_trace(text, "remove it")
            between = sorted((rule.roles or frozenset()) & {"input", "activation"})
            if between:
                text = (
                    f"{rule.roles_place}: quantizable_data_type has {' and '.join(between)}, "
                    "values between operators"
                )
                raise _needs_trace(text, 'list "weights" and "bias" alone')
        return self

    def plan(self, config: ResolvedConfig) -> Plan:
        """Return the plan of a config, without values that cannot be quantized in place."""
        plan = resolve_plan(config, self.graph, self.graph)
        return self._without_floats(plan)

    def _without_floats(self, plan: Plan) -> Plan:
        """Return the plan without the outputs that a trace has shown to stay float."""
        tensors = {}
        for (layer, role), tensor in plan.tensors.items():
            if role != "activation" or layer not in self.floats:
                tensors[layer, role] = tensor
        floats = {**plan.floats, **self.floats}
        return replace(plan, tensors=tensors, floats=floats)

    def check(self, plan: Plan) -> None:
        """Check that the layers can be changed in place, before any is.

        Raises:
            ModelError: a layer of the plan cannot be, or a weight is not finite.
        """
        for name, layer in self.tree.layers.items():
            roles = plan.of_layer(name)
            if roles:
                check_quantizable(layer, name, roles)
        check_finite(self.model)

    def remarks(self, config: ResolvedConfig, plan: Plan) -> Iterator[tuple[int, str]]:
        """Yield how many layers each rule selects, and what stays float."""
        for rule in plan.rules:
            nodes = [plan.graph.by_name[name] for name in rule.layers]
            layer_count = sum(bool(node.params) for node in nodes)
            layers = counted(layer_count, "layer")
            tensors = counted(rule.took_effect, "tensor")
            yield logging.INFO, f"{rule.label}: {layers}, {tensors} set"
        unsupported = left_float(uncovered_modules(self.model, plan.graph).values())
        for text in (*group_size_remarks(plan), *unsupported, *_not_quantized(config, plan)):
            yield logging.WARNING, text
        share = self._float_share(plan)
        level = logging.WARNING if share > MUCH else logging.INFO
        yield level, share_left(share)

    def _float_share(self, plan: Plan) -> float:
        """Return the share of all parameters of the model that stay float."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        tensors = plan.graph.tensors
        quantized = sum(tensors[path].numel() for path in _quantized_paths(plan))
        return (size - quantized) / (size or 1)

    def scope(self, plan: Plan, first: Batch) -> AlgorithmScope:
        """Return a trace of the model, without what cannot be done to its modules."""
        traced = TracedModules.of(
            self.model,
            plan,
            first,
            reason="the config has algorithms, which work on a trace of the model",
            remedy="leave the algorithms out",
        )
        return AlgorithmScope(
            target=replace(self, traced=traced),
            graph=traced.graph,
            specs=traced.specs,
            fitting=traced.fitting,
        )

    def place_outputs(self, plan: Plan, first: Batch) -> tuple[ModuleTarget, Plan]:
        """Find out after which ReLU each output is quantized.

        Args:
            plan: for the layers.
            first: a batch to trace with.

        Returns:
            The target that quantizes there, and the plan without the outputs that a traced
            network leaves float.

        Raises:
            ModelError: the model cannot be traced.
            UsageError: an output is quantized where its module does not reach.
        """
        traced = TracedModules.of(
            self.model,
            plan,
            first,
            reason="output_tensors are quantized after the ReLU that follows a layer, which "
            "needs a trace of the model",
            remedy="leave output_tensors out",
        )
        floats, rectified = _placed_outputs(traced, plan.settings)
        tree = ModuleTree(self.model, self.graph, rectified)
        target = replace(self, floats=floats, rectified=rectified, tree=tree)
        return target, target._without_floats(plan)

    def adjusted(self, adjustment: Adjustment) -> ModuleTarget:
        """Write float parameters and inserted layers into the modules."""
        # Algorithms ran in the scope of a trace
        assert self.traced is not None
        rounded = self.traced.write(adjustment)
        graph = module_graph(self.model)
        tree = ModuleTree(self.model, graph, self.rectified)
        return replace(self, changed=graph, tree=tree, rounded=rounded)

    @contextmanager
    def observed(self) -> Iterator[Observable]:
        """Yield the modules to observe, in eval mode. Their state is restored afterwards."""
        with evaluating(self.model), preserve_module_state(self.model):
            yield self.tree

    def unreached(self) -> Collection[str]:
        """Return the layers that no call has reached."""
        return self.tree.layers.keys() - self.tree.reached

    def solved(self, solution: Solution, adjustment: Adjustment) -> Solution:
        """Return the solution with rounded weights; the modules hold all other changes."""
        return solution.with_rounded(self.rounded)

    def finished(self, solution: Solution) -> Solution:
        """Quantize the modules; saving them makes codes of their parameters."""
        write_rounded(self.model, self.graph, solution.weights)
        attach_solution(self.model, self.graph, solution)
        for name in self.rectified:
            path = self.graph.by_name[name].scope
            rectify_output(self.model.get_submodule(path))
        return solution


def _needs_trace(text: str, remedy: str) -> UsageError:
    """Return the error about what a config asks for, and modules in place do not have."""
    return UsageError(
        f"{text}, which needs a trace of the model", help=f"{remedy}, or {_USE_TRACE}"
    )


def _quantized_paths(plan: Plan) -> set[str]:
    """Return the paths in the graph of the parameters that a plan quantizes."""
    paths = set()
    for name, role in plan.tensors:
        if is_parameter(role):
            paths.add(plan.graph.by_name[name].params[parameter_name(role)])
    return paths


def _not_quantized(config: ResolvedConfig, plan: Plan) -> Iterator[str]:
    """Yield a sentence on the inputs, and one on the outputs, that the config asks for in
    vain.
    """
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    for rule, planned in zip(config.rules, plan.rules, strict=True):
        for name in planned.layers:
            node = plan.graph.by_name[name]
            missing = {role for role in rule.adds if (name, role) not in plan.tensors}
            if "input" in missing and not node.inputs:
                inputs[name] = None
            if "activation" in missing and node.dtype is None:
                outputs[name] = None
    reasons = {
        "attention and experts read their weights themselves, so their inputs stay float": (
            inputs
        ),
        "what recurrent layers and attention return is not quantized": outputs,
    }
    for reason, names in reasons.items():
        layers = [name for name in names if plan.of_layer(name)]
        if layers:
            yield f"{reason}: {first_names(layers, 1)}"


_TRACE = (
    "use quantizer.calibrate or the shell, which quantize a trace of the model, or leave its "
    "output_tensors out"
)
_FOLD = "fold the norm into the layer first (torch.nn.utils.fusion), "


def _placed_outputs(
    traced: TracedModules, settings: Settings
) -> tuple[dict[str, str], frozenset[str]]:
    """Decide where the planned outputs are quantized: where a traced network quantizes them,
    after the ReLU that follows a layer.

    Returns:
        The layers whose outputs stay float in each call, and why. And the layers whose outputs
        are quantized after a ReLU. Their modules compute max(x, 0) themselves. The ReLU of the
        model then changes nothing.

    Raises:
        UsageError: an operator between a layer and the place where its output is quantized is
            one that its module cannot compute.
    """
    graph = run_passes(traced.graph, settings)
    groups = layout(graph)
    members = {}
    for group in groups.groups.values():
        for member in group.members:
            members[member] = group.members
    calls = defaultdict(list)
    for node, name in traced.names.items():
        if (name, "activation") in traced.plan.tensors:
            calls[name].append(node)
    floats = {}
    rectified = set()
    for name, nodes in calls.items():
        if all(node in groups.floats and node not in groups.groups for node in nodes):
            floats[name] = groups.floats[nodes[-1]]
            continue
        tensor = traced.plan.tensors[name, "activation"]
        follows = set()
        for node in nodes:
            if node not in graph.by_name:
                continue
            between = _folded(traced.graph, graph, node)
            if node in members:
                index = members[node].index(node)
                between += members[node][index + 1 :]
            _require_computable(tensor, between, traced.graph, graph)
            rows = [traced.graph.by_name[other].row for other in between]
            follows.add(any(row.rectifies for row in rows))
        if len(follows) > 1:
            text = f"{tensor.origins['dtype']}: {name} runs more than once, and a ReLU does not"
            raise UsageError(f"{text} always follow", help=_TRACE)
        if follows == {True}:
            rectified.add(name)
    return floats, frozenset(rectified)


def _require_computable(
    tensor: TensorPlan, between: Iterable[str], traced: Graph, graph: Graph
) -> None:
    """Raise `UsageError` if an operator after a layer is one that its module cannot compute.

    Args:
        tensor: the output of the layer.
        between: the operators before the place where it is quantized.
        traced: the trace.
        graph: the trace after passes.
    """
    is_uniform = tensor.spec.qscheme == "per_tensor"
    for other in between:
        row = traced.by_name[other].row
        if row.rectifies or (row.kind == "passthrough" and is_uniform):
            continue
        fold = _FOLD if other in graph.absorbed else ""
        raise UsageError(
            f"{tensor.origins['dtype']}: the output of {tensor.layer} is quantized after "
            f"{other}, which its module does not compute",
            help=fold + _TRACE,
        )


def _folded(traced: Graph, graph: Graph, node: str) -> list[str]:
    """Return the norms after a node that are folded into it."""
    names = []
    for name, target in graph.absorbed.items():
        norm = traced.by_name.get(name)
        if target != node or norm is None:
            continue
        if norm.row.kind != "structural":
            names.append(name)
    return names
