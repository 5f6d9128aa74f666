"""What algorithms get, and what they have changed in a network so far. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantizer.distributed import ALONE, Ranks
from quantizer.graph.edits import Insertion, with_insertions, with_weights
from quantizer.graph.ir import Graph
from quantizer.numerics.qparams import QParams
from quantizer.plan.joining.tied_scales import tied_layers
from quantizer.plan.model import TensorSpecs
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import deferred_like

if TYPE_CHECKING:
    from quantizer.graph.structure.definitions import Structure


@dataclass(frozen=True)
class RoundedWeight:
    """Holds a layer's rounded weight and what it costs.

    Args:
        weight: as the layer stores it; quantizing it with `qparams` changes nothing.
        qparams: scale and zero point of `granularity.scale_shape`.
        before: squared error of the layer's outputs over the calibration data with
            round-to-nearest, as a share of their energy. Both are estimated from some of its
            rows if the gain is clear.
        after: the same with these weights.
    """

    weight: Tensor
    qparams: QParams
    before: float
    after: float

    def stored_like(self, source: Tensor) -> RoundedWeight:
        """Return the same, with tensors in a file if the float weight `source` is in one."""
        scale = deferred_like(source, self.qparams.scale)
        zero_point = deferred_like(source, self.qparams.zero_point)
        weight = deferred_like(source, self.weight)
        return replace(self, weight=weight, qparams=QParams(scale, zero_point))


@dataclass(frozen=True)
class Remark:
    """Reports something about a layer to the user: a warning about the data, or why the layer
    stays at round-to-nearest.
    """

    layer: str
    text: str
    is_warning: bool = True


@dataclass(frozen=True)
class Adjustment:
    """Holds the state between algorithms. Each algorithm returns a new one.

    Args:
        parameters: layer -> parameter key -> float value instead of the model's. Together with
            `insertions`, the network computes the same function as before.
        insertions: layers between values and their readers.
        rounded: layer -> its rounded weight, for the (rescaled) float weight in `parameters`.
        qparams: layer -> scale and zero point that a rounding algorithm must use instead of
            those of the float weight.
        remarks: sentences for the user.
    """

    parameters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    rounded: Mapping[str, RoundedWeight] = field(default_factory=dict)
    qparams: Mapping[str, QParams] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()

    def with_parameters(self, layer: str, **values: Tensor) -> Adjustment:
        """Return it with other float parameters of one layer, whose rounded weight and scales
        are dropped.
        """
        of_layer = {**self.parameters.get(layer, {}), **values}
        rounded = dict(self.rounded)
        rounded.pop(layer, None)
        qparams = dict(self.qparams)
        qparams.pop(layer, None)
        parameters = {**self.parameters, layer: of_layer}
        return replace(self, parameters=parameters, rounded=rounded, qparams=qparams)

    def with_rounded(self, rounded: Mapping[str, RoundedWeight]) -> Adjustment:
        """Return it with more layers rounded."""
        return replace(self, rounded={**self.rounded, **rounded})

    def followed_by(self, later: Adjustment) -> Adjustment:
        """Return both, where `later` was made on the graph that this one had changed."""
        both = self
        for layer, values in later.parameters.items():
            both = both.with_parameters(layer, **values)
        return replace(
            both,
            insertions=(*self.insertions, *later.insertions),
            rounded={**both.rounded, **later.rounded},
            qparams={**both.qparams, **later.qparams},
            remarks=(*self.remarks, *later.remarks),
        )

    def with_remarks(self, *remarks: Remark) -> Adjustment:
        """Return it with more notes for the user."""
        return replace(self, remarks=(*self.remarks, *remarks))


def apply_adjustment(graph: Graph, adjustment: Adjustment) -> Graph:
    """Return the graph with the adjustment, without rounded weights. It computes the same
    function.
    """
    return with_weights(with_insertions(graph, adjustment.insertions), adjustment.parameters)


@dataclass(frozen=True)
class Task:
    """Holds what an algorithm works on.

    Args:
        graph: after the passes and before any algorithm, on the device where it shall run.
        specs: of the plan, by (layer, role).
        structure: of `graph`, with what the algorithm's entry in the config names.
        batches: opens a pass over the calibration data, on the same device.
        after_group: called with the adjustment so far and the number of groups done, for
            progress and checkpoints.
        done: how many groups an interrupted run of this algorithm had done. Their results are
            in the adjustment that the algorithm gets; it uses them and continues after them.
        before: the adjustment that the interrupted run got.
        ranks: who may share the batches. An algorithm that does not share them finds the same
            on each rank.
        memory: bytes of the network's values that may stay in memory; None for half of what is
            free.
    """

    graph: Graph
    specs: TensorSpecs
    structure: Structure
    batches: Callable[[], Iterable[Batch]]
    after_group: Callable[[Adjustment, int], None] = lambda adjustment, done: None
    done: int = 0
    before: Adjustment = field(default_factory=Adjustment)
    ranks: Ranks = ALONE
    memory: int | None = None

    @cached_property
    def tied(self) -> dict[str, tuple[str, ...]]:
        """Return for each layer whose scale is not its own all layers that share it."""
        groups: dict[str, tuple[str, ...]] = {}
        for group in tied_layers(self.graph, self.specs):
            groups.update(dict.fromkeys(group, group))
        return groups


Run = Callable[[Task, Any, Adjustment], Adjustment]
"""An algorithm: `run(task, settings of its own class, adjustment so far)`."""
