"""What algorithms are given, and what they have made of a network so far. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.distributed import ALONE, Ranks
from quantizer.graph.edits import Insertion, inserted, with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.structure import Structure
from quantizer.numerics.qparams import QParams
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import beside


@dataclass(frozen=True)
class Rounded:
    """A layer's rounded weight.

    Args:
        weight: as the layer stores it; quantizing it with `qparams` changes nothing.
        qparams: scale and zero point of `granularity.scale_shape`.
        before: squared error of the layer's outputs over the calibration data with
            round-to-nearest, as a share of their energy; both estimated from some of its rows
            where the gain is clear.
        after: the same with these weights.
    """

    weight: Tensor
    qparams: QParams
    before: float
    after: float

    def beside(self, source: Tensor) -> Rounded:
        """The same, out of memory if the float weight is."""
        qparams = QParams(
            beside(source, self.qparams.scale), beside(source, self.qparams.zero_point)
        )
        return replace(self, weight=beside(source, self.weight), qparams=qparams)


@dataclass(frozen=True)
class Remark:
    """A sentence on a layer for the user: a warning about the data, or why it was left at
    round-to-nearest.
    """

    layer: str
    text: str
    is_warning: bool = True


@dataclass(frozen=True)
class Adjustment:
    """The state between algorithms: each returns a new one.

    Args:
        parameters: layer -> parameter key -> float value instead of the model's; with
            `insertions` the network computes the same function as before.
        insertions: layers between values and their readers.
        rounded: layer -> its rounded weight, for the (rescaled) float weight in `parameters`.
        qparams: layer -> scale and zero point that a rounding algorithm must use instead of
            those of the float weight.
        remarks: what the user should know.
    """

    parameters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    rounded: Mapping[str, Rounded] = field(default_factory=dict)
    qparams: Mapping[str, QParams] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()

    def with_parameters(self, layer: str, **values: Tensor) -> Adjustment:
        """With other float parameters of one layer; what was rounded of it before is
        forgotten.
        """
        parameters = {**self.parameters, layer: {**self.parameters.get(layer, {}), **values}}
        rounded = {name: row for name, row in self.rounded.items() if name != layer}
        qparams = {name: row for name, row in self.qparams.items() if name != layer}
        return replace(self, parameters=parameters, rounded=rounded, qparams=qparams)

    def with_rounded(self, found: Mapping[str, Rounded]) -> Adjustment:
        """With more layers rounded."""
        return replace(self, rounded={**self.rounded, **found})

    def followed_by(self, later: Adjustment) -> Adjustment:
        """Return both, of which `later` was made on the graph that this one had changed."""
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
        """With more remarks."""
        return replace(self, remarks=(*self.remarks, *remarks))


def adjusted(graph: Graph, found: Adjustment, *, rounded: bool = False) -> Graph:
    """The graph with what was found: the same function, or with `rounded` weights where there
    are any.
    """
    weights = dict(found.parameters)
    for layer, row in found.rounded.items() if rounded else ():
        weights[layer] = {**weights.get(layer, {}), "weight": row.weight}
    return with_weights(inserted(graph, found.insertions), weights)


Progress = Callable[[Adjustment, int], None]
"""Called with what is found so far and the number of groups done, after each group."""


@dataclass(frozen=True)
class Task:
    """What an algorithm works on.

    Args:
        graph: after the passes and before any algorithm, on the device where it shall run.
        specs: of the plan, by (layer, role).
        structure: of `graph`, with what the algorithm's entry in the config names.
        batches: opens a pass over the calibration data, on the same device.
        after_group: for progress and checkpoints.
        done: how many groups an interrupted run of this algorithm had done, all of them in the
            adjustment it is given: it runs through them with what was found and goes on after
            them.
        before: what this algorithm was given when it began, before the groups that are `done`.
        ranks: who may share the batches; an algorithm that does not share them finds the same
            on each rank.
        memory: bytes of the network's values that may stay in memory; None for half of what is
            free.
    """

    graph: Graph
    specs: Mapping[Key, QuantizationSpec]
    structure: Structure
    batches: Callable[[], Iterable[Batch]]
    after_group: Progress = lambda adjustment, done: None
    done: int = 0
    before: Adjustment = field(default_factory=Adjustment)
    ranks: Ranks = ALONE
    memory: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the graph's tensors are."""
        return self.graph.device


Run = Callable[[Task, Any, Adjustment], Adjustment]
"""An algorithm: `run(task, settings of its own class, what was found before it)`."""
