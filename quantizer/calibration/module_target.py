"""The modules of a model where they stand, as the target of a calibration. What only a trace
can do is refused.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from torch import nn

from quantizer.algorithms.adjustment import Adjustment, Rounded
from quantizer.calibration.module_algorithms import TracedModules, write_rounded
from quantizer.calibration.module_attach import attach
from quantizer.calibration.module_outputs import kept_float, rectified
from quantizer.calibration.observing import Observable
from quantizer.calibration.solution import Solution
from quantizer.calibration.target import AlgorithmScope, Target
from quantizer.config.algorithms import SWITCHES
from quantizer.config.model import Config
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import shortened
from quantizer.errors import UsageError
from quantizer.graph.modules import key_in_module, left_out, module_graph, parameters_of
from quantizer.nn.inplace import ModuleTree, check_float, check_quantizable, rectify_output
from quantizer.plan.model import Plan
from quantizer.plan.remarks import MUCH, left_float, share_left, ungrouped
from quantizer.plan.resolve import resolve
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import left_alone
from quantizer.sources.weights import check_finite

NEEDS_TRACE = {
    "include_cle": "equalizes neighbouring layers",
    "include_bias_corr": "corrects biases layer by layer, on the inputs that quantized layers "
    "before "
    "it "
    "make",
    "convert_relu6_to_relu": "replaces operators",
    "convert_silu_to_hswish": "replaces operators",
}
"""Settings that no single module can follow, and what each does."""


class ModuleTarget(Target):
    """A model whose layers become quantized layers of the same classes. Whoever calls undoes a
    failure.

    Raises:
        ModelError: it is no module, compiled, quantized already, or has layers without weights.
    """

    is_traced = False

    def __init__(self, model: nn.Module) -> None:
        check_float(model)
        self.model = model
        self.original = self.graph = module_graph(model)
        self._tree = ModuleTree(model, self.graph)
        self._traced: TracedModules | None = None
        self._rectified: frozenset[str] = frozenset()
        self._floats: dict[str, str] = {}
        self._rounded: dict[str, Rounded] = {}

    def prepare(self, config: Config, refused: Collection[str] = ()) -> None:
        """Refuse what only a trace can do."""
        listed = {
            kind.switch: name
            for name, kind in SWITCHES.items()
            if config.form == "hierarchical"
        }
        for name, what in NEEDS_TRACE.items():
            if getattr(config.settings, name):
                text = (
                    f"{what}, which modules in place do not show: it needs a trace of the model"
                )
                remedy = "remove it" if name in listed else "set it to false"
                help_ = f"{remedy}, or use quantizer.calibrate, which traces the model"
                raise UsageError(f"{listed.get(name, name)} {text}", help=help_)
        for rule in config.rules:
            between = sorted((rule.roles or frozenset()) & {"input", "activation"})
            if between:
                raise UsageError(
                    f"{rule.roles_place}: quantizable_data_type has {' and '.join(between)}, "
                    "which are quantized between operators, and modules in place do not show "
                    "these",
                    help='list "weights" and "bias" alone, or use quantizer.calibrate, which '
                    "traces the model",
                )

    def plan(self, config: Config, more: Adjustment | None = None) -> Plan:
        assert more is None  # modules show no joins, which alone are tried out
        return self._without_floats(resolve(config, self.graph, self.graph))

    def _without_floats(self, plan: Plan) -> Plan:
        """Return the plan without the outputs that a trace has shown to stay float."""
        tensors = {}
        for (layer, role), tensor in plan.tensors.items():
            if role != "activation" or layer not in self._floats:
                tensors[layer, role] = tensor
        return replace(plan, tensors=tensors, floats={**plan.floats, **self._floats})

    def check(self, plan: Plan) -> None:
        """Look whether the layers can be changed in place, before anything is.

        Raises:
            ModelError: one that is to be quantized cannot, or what stays float is not finite.
        """
        for name, layer in self._tree.layers.items():
            if roles := plan.of_layer(name):
                check_quantizable(layer, name, roles)
        keys = [key for key in plan.tensors if is_parameter(key[1])]
        paths = (plan.graph.by_name[layer].params[parameter_name(role)] for layer, role in keys)
        check_finite(self.model, besides={path.removesuffix(".T") for path in paths})

    def remarks(self, config: Config, plan: Plan) -> Iterator[tuple[int, str]]:
        """How many layers each rule found, and what stays float although the config may be read
        otherwise.
        """
        for rule in plan.rules:
            layers = [name for name in rule.layers if plan.graph.by_name[name].params]
            yield (
                logging.INFO,
                f"{rule.label}: {len(layers)} layers, {rule.took_effect} tensors set",
            )
        unseen = left_float(left_out(self.model, plan.graph).values())
        for text in (*ungrouped(plan), *unseen, *_unshown(config, plan)):
            yield logging.WARNING, text
        share = self._share_left(plan)
        yield (logging.WARNING if share > MUCH else logging.INFO), share_left(share)

    def _share_left(self, plan: Plan) -> float:
        """The share of the model's parameters that stay float, those counted in that no layer
        of the graph has.
        """
        sizes = [(id(parameter), parameter.numel()) for parameter in self.model.parameters()]
        modules, covered = dict(self.model.named_modules()), set[int]()
        for name, role in filter(lambda key: is_parameter(key[1]), plan.tensors):
            node = self.graph.by_name[name]
            key = key_in_module(node, parameter_name(role))
            covered.add(
                id(modules[node.scope].get_parameter(parameters_of(modules[node.scope])[key]))
            )
        return sum(size for at, size in sizes if at not in covered) / (
            sum(size for _, size in sizes) or 1
        )

    def scope(self, plan: Plan, first: Batch) -> AlgorithmScope:
        """A trace of the model, without what cannot be done to its modules."""
        why = "the config has algorithms, which work on a trace of the model"
        self._traced = self._trace(plan, first, why, "leave the algorithms out")
        return AlgorithmScope(self._traced.graph, self._traced.specs, self._traced.fitting)

    def place_outputs(self, plan: Plan, first: Batch) -> Plan:
        """Find out after which ReLU each output is quantized; `first` is a batch to trace with.

        Returns:
            The plan without the outputs that a traced network leaves float.

        Raises:
            ModelError: the model cannot be traced.
            UsageError: an output is quantized where its module does not reach.
        """
        why = (
            "output_tensors are quantized after the ReLU that follows a layer, which a trace "
            "of the model shows"
        )
        traced = self._trace(plan, first, why, "leave output_tensors out")
        self._floats = kept_float(traced, plan.settings)
        plan = self._without_floats(plan)
        traced = replace(traced, plan=plan)
        self._rectified = rectified(traced, plan.settings)
        self._tree = ModuleTree(self.model, self.graph, self._rectified)
        return plan

    def _trace(self, plan: Plan, first: Batch, why: str, help_: str) -> TracedModules:
        with evaluating(self.model):
            return TracedModules.of(self.model, plan, first, why, help_)

    def adjust(self, found: Adjustment) -> None:
        """Write float parameters and inserted layers into the modules."""
        assert self._traced is not None  # algorithms ran in its scope
        self._rounded = self._traced.write(found)
        self.graph = module_graph(self.model)
        self._tree = ModuleTree(self.model, self.graph, self._rectified)

    @contextmanager
    def observed(self) -> Iterator[Observable]:
        with evaluating(self.model), left_alone(self.model):
            yield self._tree

    def unreached(self) -> Collection[str]:
        return self._tree.layers.keys() - self._tree.reached

    def solved(self, found: Solution, adjustment: Adjustment) -> Solution:
        """With rounded weights on their scales; the modules hold all else already."""
        return found.with_rounded(self._rounded)

    def finished(self, solution: Solution) -> Solution:
        """Codes are made of the modules' parameters, when they are saved."""
        write_rounded(self.model, self.graph, solution.weights)
        attach(self.model, self.graph, solution)
        for name in self._rectified:
            rectify_output(self.model.get_submodule(self.graph.by_name[name].scope))
        return solution


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    with suppress(NotImplementedError):  # an exported program has no modes
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _unshown(config: Config, plan: Plan) -> Iterator[str]:
    """Inputs and outputs that the config asks for and modules do not show."""
    wanted = [
        (role, name)
        for rule, found in zip(config.rules, plan.rules, strict=True)
        for role in rule.adds
        for name in found.layers
        if (name, role) not in plan.tensors
    ]
    unread = [
        name for role, name in wanted if role == "input" and not plan.graph.by_name[name].inputs
    ]
    tuples = [
        name
        for role, name in wanted
        if role == "activation" and plan.graph.by_name[name].dtype is None
    ]
    for names, reason in (
        (
            unread,
            "attention and experts read their weights themselves, so their inputs stay float",
        ),
        (tuples, "what recurrent layers and attention return is not quantized"),
    ):
        layers = [name for name in dict.fromkeys(names) if plan.of_layer(name)]
        if layers:
            yield f"{reason}: {shortened(layers, 1)}"
