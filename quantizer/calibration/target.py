"""What a config is applied to: a traced network, or (in `module_target`) the modules of a model
in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from quantizer.calibration.observing import Observable
from quantizer.calibration.solution import Solution, encode_parameters
from quantizer.config.algorithms import Algorithm
from quantizer.config.model import ResolvedConfig
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.layerwise.adjustment import Adjustment, apply_adjustment
from quantizer.nn.layer import weights_last
from quantizer.nn.network import Network
from quantizer.plan.model import Plan, TensorSpecs
from quantizer.plan.remarks import plan_remarks
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

if TYPE_CHECKING:
    from quantizer.graph.structure.definitions import Structure


@dataclass(frozen=True)
class AlgorithmScope:
    """The network that algorithms change, and its specs.

    Attributes:
        target: the target whose `adjusted` takes the adjustments of the algorithms.
        graph: the network.
        specs: how each tensor is quantized, by layer and role.
        fitting: returns the groups of a structure that an algorithm can change.
    """

    target: Target
    graph: Graph
    specs: TensorSpecs
    fitting: Callable[[Algorithm, Structure], Structure]


@dataclass(frozen=True)
class Target:
    """A model as the steps of the calibration see it: a graph that `torch.export` made of it.
    Changes return a new target.

    Args:
        original: the graph of the model as the caller passed it.
        changed: the graph with the passes and adjustments so far; None before any.

    Attributes:
        is_traced: whether the graph shows which layers read each other's values.
    """

    original: Graph
    changed: Graph | None = None
    is_traced: ClassVar[bool] = True

    @property
    def graph(self) -> Graph:
        """Return the graph as it is now."""
        return self.original if self.changed is None else self.changed

    def prepared(self, config: ResolvedConfig, kept: Mapping[str, Any] | None = None) -> Target:
        """Return the target with its graph in the form that is planned.

        Args:
            config: says which passes run.
            kept: what was decided on data about passes, by name.

        Raises:
            UsageError: the config asks for what this kind of target cannot do.
        """
        changed = run_passes(self.original, config.settings, kept=kept)
        return replace(self, changed=changed)

    def plan(self, config: ResolvedConfig) -> Plan:
        """Return the plan for the graph."""
        return resolve_plan(config, self.graph, self.original)

    def remarks(self, config: ResolvedConfig, plan: Plan) -> Iterator[tuple[int, str]]:
        """Yield messages about the plan for the user, each after its level of `logging`: what
        passes did to parameters, and which operators stay float.
        """
        for text in plan_remarks(plan):
            yield logging.INFO, text

    def scope(self, plan: Plan, first: Batch) -> AlgorithmScope:
        """Return the network that algorithms change; `first` is a batch to trace with.

        Raises:
            ModelError: the model cannot be traced.
        """
        return AlgorithmScope(
            target=self,
            graph=plan.graph,
            specs=plan.specs,
            fitting=lambda algorithm, structure: structure,
        )

    def adjusted(self, adjustment: Adjustment) -> Target:
        """Return the target with an adjustment, which keeps the float function.

        Raises:
            ModelError: no module of the model can hold a change.
        """
        changed = apply_adjustment(self.graph, adjustment)
        return replace(self, changed=changed)

    def observed(self) -> AbstractContextManager[Observable]:
        """Return the float model, whose values can be observed in the context."""
        network = Network(self.graph)
        return nullcontext(weights_last(network))

    def unreached(self) -> Collection[str]:
        """Return the layers that no batch has reached. A trace has only layers that run."""
        return ()

    def solved(self, solution: Solution, adjustment: Adjustment) -> Solution:
        """Return the solution with rounded weights, and all changes of the float network."""
        rescaled = adjustment.parameters
        solution = solution.with_qparams(adjustment.qparams)
        solution = solution.with_weights(rescaled)
        solution = solution.with_rounded(adjustment.rounded)
        return replace(solution, insertions=adjustment.insertions, rescaled=rescaled)

    def finished(self, solution: Solution) -> Solution:
        """Return the solution with codes of the parameters, or apply it to the modules."""
        return encode_parameters(self.graph, solution)
