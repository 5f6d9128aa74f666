"""What a config is applied to: a traced network, or (in `module_target`) the modules of a model
where they stand.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from quantizer.algorithms.adjustment import Adjustment, adjusted
from quantizer.calibration.observing import Observable
from quantizer.calibration.solution import Solution, encoded
from quantizer.config.model import Algorithm, Config, QuantizationSpec
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.structure import Structure
from quantizer.nn.image_layout import weights_last
from quantizer.nn.network import Network
from quantizer.plan.model import Key, Plan
from quantizer.plan.remarks import remarks
from quantizer.plan.resolve import resolve
from quantizer.sources.batches import Batch


@dataclass(frozen=True)
class AlgorithmScope:
    """What algorithms work on: a graph, the specs of its nodes, and which part of a structure
    can be changed.
    """

    graph: Graph
    specs: Mapping[Key, QuantizationSpec]
    fitting: Callable[[Algorithm, Structure], Structure] = lambda algorithm, structure: (
        structure
    )


class Target(Protocol):
    """What the steps of the pipeline do to a model, whichever way it is held.

    Attributes:
        original: the model as it was given.
        is_traced: whether the graph shows what layers read of each other.
    """

    original: Graph
    is_traced: bool

    def prepare(self, config: Config, refused: Collection[str] = ()) -> None:
        """Bring the graph into the form that is planned.

        Args:
            config: says which passes run.
            refused: layers whose high biases stay, as calibration data have decided.

        Raises:
            UsageError: the config asks for what this kind of target cannot do.
        """

    def plan(self, config: Config, more: Adjustment | None = None) -> Plan:
        """The plan for the graph as it is now, or would be with `more`."""

    def remarks(self, config: Config, plan: Plan) -> Iterator[tuple[int, str]]:
        """What the user should hear of the plan, with levels of `logging`."""

    def scope(self, plan: Plan, first: Batch) -> AlgorithmScope:
        """What algorithms work on; `first` is a batch to trace with.

        Raises:
            ModelError: it cannot be traced.
        """

    def adjust(self, found: Adjustment) -> None:
        """Take up what algorithms found: the float function stays.

        Raises:
            ModelError: an algorithm changes what has no place in a module.
        """

    def observed(self) -> AbstractContextManager[Observable]:
        """The float model, whose values can be watched for a while."""

    def unreached(self) -> Collection[str]:
        """Layers that no batch has come to."""

    def solved(self, found: Solution, adjustment: Adjustment) -> Solution:
        """The solution with what algorithms found."""

    def finished(self, solution: Solution) -> Solution:
        """The solution with codes of the parameters, or applied to the modules, which then hold
        them.
        """


class TracedTarget(Target):
    """A graph that `torch.export` made of a model: `original` as traced, `graph` with what was
    done to it since.
    """

    is_traced = True

    def __init__(self, original: Graph) -> None:
        self.original = self.graph = original

    def prepare(self, config: Config, refused: Collection[str] = ()) -> None:
        self.graph = run_passes(self.original, config.settings, refused=refused)

    def plan(self, config: Config, more: Adjustment | None = None) -> Plan:
        graph = self.graph if more is None else adjusted(self.graph, more)
        return resolve(config, graph, self.original)

    def remarks(self, config: Config, plan: Plan) -> Iterator[tuple[int, str]]:
        """What passes did to parameters, and which operators stay float."""
        return ((logging.INFO, text) for text in remarks(plan))

    def scope(self, plan: Plan, first: Batch) -> AlgorithmScope:
        return AlgorithmScope(
            plan.graph, {key: tensor.spec for key, tensor in plan.tensors.items()}
        )

    def adjust(self, found: Adjustment) -> None:
        self.graph = adjusted(self.graph, found)

    def observed(self) -> AbstractContextManager[Observable]:
        return nullcontext(weights_last(Network(self.graph)))

    def unreached(self) -> Collection[str]:
        """A trace holds nothing that does not run."""
        return ()

    def solved(self, found: Solution, adjustment: Adjustment) -> Solution:
        """With rounded weights on their scales, and with all that the float network was changed
        by.
        """
        rescaled = adjustment.parameters
        made = replace(found, insertions=adjustment.insertions, rescaled=rescaled)
        return (
            made.with_qparams(adjustment.qparams)
            .with_weights(rescaled)
            .with_rounded(adjustment.rounded)
        )

    def finished(self, solution: Solution) -> Solution:
        return encoded(self.graph, solution)
