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

from quantizer.calibration.events import Stage
from quantizer.calibration.fingerprint import input_shapes
from quantizer.calibration.solution import Solution, encoded, quantized_network
from quantizer.export.choices import CHOICES
from quantizer.graph.ir import Graph
from quantizer.graph.output_parts import Output, output_parts, parts_named_as
from quantizer.nn.network import Network
from quantizer.results.calibrated import Calibrated, call_of_shapes
from quantizer.sources.batches import Batch


@dataclass(frozen=True)
class Deployment:
    """A calibrated network and the data to verify files with; all on the CPU.

    `args` and `kwargs` are a call of the model, which no file keeps. `opset` is the ONNX
    operator set, -1 to let the exporter choose. `batches` are the evaluation data, which can be
    gone through again; without them the one call stands for all. `sqnr_db` is what quantization
    costs the worst output in test mode, in dB: a runtime that rounds otherwise should not cost
    more; `figures` has that of each output and part, as `sqnr_db[0.boxes]`. `model` is the
    float model, of which checkpoints keep names and config; `choices` are values of `CHOICES`
    by name; `float_graph` is the network that `sqnr_db` is measured against. `named` are the
    outputs of `graph`, by the names of the user's model; `warnings` are what test mode says of
    outputs that have lost.
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
    figures: Mapping[str, float] = field(default_factory=dict)
    named: tuple[Output, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        calibrated: Calibrated,
        model: nn.Module,
        batches: Iterable[Batch],
        figures: Mapping[str, float],
        choices: Mapping[str, str],
        *,
        warnings: Iterable[str] = (),
    ) -> Deployment:
        """What is given to exporters of a calibrated model, verified on all batches."""
        first, opset = (
            next(iter(batches)).to("cpu").stable(),
            calibrated.settings.onnx_opset_version,
        )
        graph, floating = (
            each.on(torch.device("cpu")) for each in (calibrated.graph, calibrated.float_graph)
        )
        call = first.args, first.kwargs
        return cls(
            graph,
            calibrated.solution,
            *call,
            opset,
            batches,
            figures.get("sqnr_db", math.inf),
            model,
            choices,
            floating,
            figures,
            parts_named_as(graph, calibrated.original),
            tuple(warnings),
        )

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
    def outputs(self) -> tuple[Output, ...]:
        """The tensors that the network returns, with their parts."""
        return self.named or output_parts(self.graph)

    @cached_property
    def steps(self) -> list[float | None]:
        """For each tensor of the output the distance of two codes, None where it is not
        integers times one scale.
        """
        return [self._step(output.node) for output in self.outputs]

    @cached_property
    def part_steps(self) -> dict[str, float]:
        """The distance of two codes for each output and part that is integers times one scale,
        by name.
        """
        steps: dict[str, float] = {}
        for output, whole in zip(self.outputs, self.steps, strict=True):
            for part in output.parts:
                step = whole
                if step is None and part.layer and part.pooled == 1:
                    step = self._step(self._quantized_before(part.layer))
                if step is not None:
                    steps[part.name] = step
        return steps

    def _step(self, name: str) -> float | None:
        """Return the distance of two codes of a node's value, None where it is not integers
        times one scale.
        """
        node = self.graph.by_name[name]
        tensor = self.solution.tensors.get(
            (name, "input" if node.op == "input" else "activation")
        )
        if tensor is None or tensor.spec.dtype != "int" or tensor.spec.is_dynamic:
            return None
        return float(tensor.scale) if tensor.scale.numel() == 1 else None

    def _quantized_before(self, name: str) -> str:
        """Return the nearest node before one that only moves values whose value is quantized;
        itself if it does not.
        """
        node = self.graph.by_name[name]
        while (node.name, "activation") not in self.solution.tensors and node.row.only_moves:
            source = self.graph.source(node)
            if source is None:
                break
            node = source
        return node.name

    def loss_of(self, name: str) -> float:
        """Return what quantization costs an output or part in test mode, in dB."""
        return self.figures.get(f"sqnr_db[{name}]", self.sqnr_db)

    @cached_property
    def blank(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with zeros for values and, where the batch may vary, two samples: torch
        takes a batch of one for a constant, and a length at which the model was not traced for
        a limit, perhaps.
        """
        shapes = [
            shape and [2 if size is None else size for size in shape]
            for shape in input_shapes(self.graph)
        ]
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
