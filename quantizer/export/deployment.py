"""What every exporter is given and what it answers. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.engine.calibrated import Calibrated, call_of_shapes
from quantizer.engine.events import Stage
from quantizer.engine.fingerprint import input_shapes
from quantizer.engine.solution import Solution, encoded, quantized_network
from quantizer.export.choices import CHOICES
from quantizer.graph.ir import Graph, references
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch


@dataclass(frozen=True)
class Deployment:
    """A calibrated network and the data to verify files with; all on the CPU.

    `args` and `kwargs` are a call of the model, which no file keeps. `opset` is the ONNX operator set, -1 to let the
    exporter choose. `batches` are the evaluation data, which can be gone through again; without them the one
    call stands for all. `sqnr_db` is what quantization costs the outputs in test mode, in dB: a runtime that rounds
    otherwise should not cost more. `model` is the float model, of which checkpoints keep names and config;
    `choices` are values of `CHOICES` by name; `float_graph` is the network that `sqnr_db` is measured against.
    """

    graph: Graph
    solution: Solution
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    opset: int = -1
    batches: Iterable[Batch] = ()
    sqnr_db: float = math.inf
    model: nn.Module | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    float_graph: Graph | None = None

    @classmethod
    def of(
        cls,
        calibrated: Calibrated,
        model: nn.Module,
        batches: Iterable[Batch],
        sqnr_db: float,
        choices: Mapping[str, str],
    ) -> Deployment:
        """What is given to exporters of a calibrated model, verified on all batches."""
        first, opset = next(iter(batches)).to("cpu").stable(), calibrated.settings.onnx_opset_version
        graph, floating = (each.on(torch.device("cpu")) for each in (calibrated.graph, calibrated.float_graph))
        call = first.args, first.kwargs
        return cls(graph, calibrated.solution, *call, opset, batches, sqnr_db, model, choices, floating)

    def in_memory(self) -> Deployment:
        """The same with all weights in memory."""
        if not self.graph.is_deferred:
            return self
        return replace(self, graph=self.graph.in_memory(), solution=self.solution.in_memory())

    def followed(self, stage: Stage) -> Deployment:
        """The same, whose batches a stage counts as they are read for the first time."""
        return replace(self, batches=_Followed(self.batches, stage)) if self.batches else self

    def choice(self, name: str) -> str:
        """What was chosen where a target leaves something open."""
        return self.choices.get(name, CHOICES[name].values[0])

    def network(self) -> Network:
        """The network as test mode runs it; a fresh one, which the exporter may change."""
        return quantized_network(self.graph, self.encoded)

    @cached_property
    def encoded(self) -> Solution:
        """The solution with the codes of parameters, which files are written from."""
        return encoded(self.graph, self.solution)

    @cached_property
    def expected(self) -> list[Tensor]:
        """The tensors of test mode's output for the call, in order."""
        with torch.no_grad():
            return tensor_leaves(self.network()(*self.args, **self.kwargs))

    def calls(self) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        """Positional and keyword arguments of each call to verify with."""
        for batch in self.batches or [Batch(self.args, self.kwargs, None, None)]:
            yield batch.args, batch.kwargs

    @cached_property
    def steps(self) -> list[float | None]:
        """For each tensor of the output the distance of two codes, None where it is not integers times one scale."""
        found: list[float | None] = []
        for name in references(self.graph.output):
            tensor = self.solution.tensors.get((name, "activation"))
            is_even = tensor is not None and tensor.spec.dtype == "int" and not tensor.spec.is_dynamic
            found.append(float(tensor.scale) if tensor and is_even and tensor.scale.numel() == 1 else None)
        return found

    @cached_property
    def blank(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with zeros for values and, where the batch may vary, two samples: torch takes a batch of one for a
        constant, and a length at which the model was not traced for a limit, perhaps.
        """
        shapes = [shape and [2 if size is None else size for size in shape] for shape in input_shapes(self.graph)]
        for length in self.graph.lengths:
            for index, axis in length.axes:
                cast(list[int], shapes[index])[axis] = length.traced
        call = call_of_shapes(self.args, self.kwargs, shapes)
        assert call is not None  # it has the inputs of the graph
        return call


@dataclass
class _Followed:
    """Batches on the CPU, of which a stage counts one pass."""

    batches: Iterable[Batch]
    stage: Stage
    passes: int = 0

    def __iter__(self) -> Iterator[Batch]:
        found = (batch.to("cpu") for batch in self.batches)
        self.passes += 1
        return found if self.passes > 1 else self.stage.counted(found)


def tensor_leaves(output: Any) -> list[Tensor]:
    """The tensors in a nested output; constants are no part of a file."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
