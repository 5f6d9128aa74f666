"""What every exporter is given: a calibrated network, data to verify files with, and what files
state about how they were made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantizer
from quantizer.calibration.events import RunStage
from quantizer.calibration.fingerprint import input_shapes
from quantizer.calibration.solution import Solution, encode_parameters, quantized_network
from quantizer.config.json_types import JsonMapping
from quantizer.evaluation.scores import FollowedBatches
from quantizer.export.layer_choice import LayerChoice
from quantizer.export.targets import CHOICES
from quantizer.export.value_names import in_traced_order, names_of_files
from quantizer.graph.channels.output_parts import Output, output_parts, parts_named_as
from quantizer.graph.ir import Call, Graph
from quantizer.graph.tracing.batch_axes import fixed_batch
from quantizer.graph.tracing.lengths import Length
from quantizer.nn.network import Network
from quantizer.results.calibrated import Calibrated
from quantizer.sources.arguments import arguments_of, call_with_shapes
from quantizer.sources.batches import Batch

ORIGIN_FILE = "quantizer.json"
"""The name of the origin in files that hold further files."""


@dataclass(frozen=True)
class Origin:
    """What a file was made from. It has no names of files, and equal runs have equal ones.

    Attributes:
        config: as config.resolved.json has it.
        metrics: of the test.
        sizes: of images and sounds that the network takes, by the name of their dimension, and
            its number of samples if that is fixed.
    """

    config: JsonMapping = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)

    def _content(self) -> dict[str, Any]:
        """Return what is known, by name."""
        content: dict[str, Any] = {"producer": "quantizer", "version": quantizer.__version__}
        metrics = {
            # More digits may depend on the number of threads
            name: float(f"{value:.6g}")
            for name, value in self.metrics.items()
            if math.isfinite(value)
        }
        parts = {"config": self.config, "metrics": metrics, "sizes": self.sizes}
        return content | {name: part for name, part in parts.items() if part}

    def texts(self) -> dict[str, str]:
        """Return the texts to store by name; config and metrics are JSON on one line.

        >>> Origin({"exclude": []}, {"top1": 0.99803921}).texts()["metrics"]
        '{"top1":0.998039}'
        """
        return {
            name: part if isinstance(part, str) else _compact(part)
            for name, part in self._content().items()
        }

    def text(self) -> str:
        """Return the same as one JSON object."""
        return _compact(self._content())


def _compact(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


_SMALLER = 2
"""A file with open sizes is also run on inputs that are so many times smaller."""


@dataclass(frozen=True)
class Deployment:
    """A calibrated network and the data to verify files with, all on the CPU.

    Attributes:
        args, kwargs: a call of the model, which no file keeps.
        opset: the ONNX operator set; -1 to let the exporter choose.
        batches: the evaluation data, which can be iterated again; without them the one call is
            used.
        sqnr_db: what quantization costs the worst output in test mode, in dB. A runtime that
            rounds in another way may cost no more.
        model: the float model, of which checkpoints keep names and config.
        choices: values of `CHOICES` by name.
        float_graph: the network that `sqnr_db` is measured against.
        figures: the SQNR of each output and part, as `sqnr_db[0.boxes]`.
        named: the outputs of `graph`, by the names of the user's model.
        warnings: of test mode, on outputs that lost much.
        origin: what the file states about how it was made.
        layer_choice: which layers `solution` leaves in float for speed; None if that was not
            asked for.
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
    origin: Origin = field(default_factory=Origin)
    layer_choice: LayerChoice | None = None

    @classmethod
    def of(
        cls,
        calibrated: Calibrated,
        model: nn.Module,
        batches: Iterable[Batch],
        figures: Mapping[str, float],
        *,
        choices: Mapping[str, str],
        metrics: Mapping[str, float],
        warnings: Iterable[str] = (),
        layer_choice: LayerChoice | None = None,
    ) -> Deployment:
        """Return the deployment of a calibrated model, verified on all batches.

        `figures` are the SQNR of outputs and parts, and `metrics` all metrics of the test.
        """
        first = next(iter(batches)).to("cpu").stable()
        cpu = torch.device("cpu")
        graph = calibrated.graph.on(cpu)
        args, kwargs = in_traced_order(graph, first)
        return cls(
            graph,
            calibrated.solution,
            args,
            kwargs,
            opset=calibrated.settings.onnx_opset_version,
            batches=batches,
            sqnr_db=figures.get("sqnr_db", math.inf),
            model=model,
            choices=choices,
            float_graph=calibrated.float_graph.on(cpu),
            figures=figures,
            named=parts_named_as(graph, calibrated.original),
            warnings=tuple(warnings),
            origin=Origin(calibrated.config, metrics, _open_sizes(calibrated.graph)),
            layer_choice=layer_choice,
        )

    def in_memory(self) -> Deployment:
        """Return the same with all weights in memory."""
        if not self.graph.is_deferred:
            return self
        return replace(self, graph=self.graph.in_memory(), solution=self.solution.in_memory())

    def followed(self, stage: RunStage) -> Deployment:
        """Return the same, with batches that a stage counts when they are first read."""
        if not self.batches:
            return self
        return replace(self, batches=FollowedBatches(self.batches, stage))

    def choice(self, name: str) -> str:
        """Return the value of a target's option."""
        return self.choices.get(name, CHOICES[name].default)

    def network(self) -> Network:
        """Return a new network as test mode runs it, which the exporter may change."""
        return quantized_network(self.graph, self.encoded)

    @cached_property
    def reference(self) -> Network:
        """Return the network as test mode runs it, for those that verify: none changes it."""
        return self.network()

    @cached_property
    def encoded(self) -> Solution:
        """Return the solution with the codes of parameters, which files are written from."""
        return encode_parameters(self.graph, self.solution)

    @cached_property
    def _names(self) -> tuple[list[str], list[str]]:
        names = [output.name for output in self.outputs]
        return names_of_files(self.choices, self.model, self.graph, names)

    @property
    def input_names(self) -> list[str]:
        """Return the names of the call's tensors in files, in the order of the graph.

        Raises:
            UsageError: an option for names does not fit the model.
        """
        return self._names[0]

    @property
    def output_names(self) -> list[str]:
        """Return the names of the network's tensors in files.

        Raises:
            UsageError: an option for names does not fit the model.
        """
        return self._names[1]

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Return what the user's model calls its positional arguments, as far as it says so."""
        return arguments_of(self.model).names

    @property
    def call(self) -> Call:
        """Return the call of the model."""
        return self.args, dict(self.kwargs)

    def calls(self) -> Iterator[Call]:
        """Yield positional and keyword arguments of each call to verify with.

        The last one has other sizes than the first, if `--dynamic` leaves sizes open.
        """
        for batch in self.batches or [Batch(self.args, self.kwargs, None, None)]:
            yield in_traced_order(self.graph, batch)
        lengths = _asked_lengths(self.graph)
        if lengths:
            leaves, structure = pytree.tree_flatten(self.call)
            for length in lengths:
                for index, axis in length.axes:
                    leaves[index] = _of_other_size(leaves[index], axis, length)
            yield pytree.tree_unflatten(leaves, structure)

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """Return the tensors that the network returns, with their parts."""
        return self.named or output_parts(self.graph)

    @cached_property
    def steps(self) -> list[float | None]:
        """Return the distance of two codes for each tensor of the output.

        None stands for a tensor that is not integers times one scale.
        """
        return [self._step(output.node) for output in self.outputs]

    @cached_property
    def part_steps(self) -> dict[str, float]:
        """Return the distance of two codes of outputs and parts with one scale, by name."""
        steps: dict[str, float] = {}
        for output, whole in zip(self.outputs, self.steps, strict=True):
            for part in output.parts:
                step = whole
                if step is None and part.layer and part.pooled == 1:
                    step = self._step(self._quantized_origin(part.layer))
                if step is not None:
                    steps[part.name] = step
        return steps

    def _step(self, name: str) -> float | None:
        node = self.graph.by_name[name]
        role = "input" if node.op == "input" else "activation"
        tensor = self.solution.tensors.get((name, role))
        if tensor is None or tensor.spec.dtype != "int" or tensor.spec.is_dynamic:
            return None
        return float(tensor.scale) if tensor.scale.numel() == 1 else None

    def _quantized_origin(self, name: str) -> str:
        """Return the nearest node with a quantized value, before nodes that only move data."""
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

    def blank_call(self, most_samples: int | None = None) -> Call:
        """Return the call with zeros for values, and two samples where the batch may vary.

        torch takes a batch of one for a constant. A length other than the traced one may become
        a limit.

        Args:
            most_samples: the largest batch; None if there is no limit.
        """
        samples = 2 if most_samples is None else min(2, most_samples)
        shapes: list[list[int | None] | None] = []
        for shape in input_shapes(self.graph):
            if shape is not None:
                shape = [samples if size is None else size for size in shape]
            shapes.append(shape)
        for length in self.graph.lengths:
            for index, axis in length.axes:
                sizes = shapes[index]
                assert sizes is not None
                sizes[axis] = length.traced
        call = call_with_shapes(*self.call, shapes)
        # The call has the inputs of the graph.
        assert call is not None
        return call


def _of_other_size(tensor: Tensor, axis: int, length: Length) -> Tensor:
    """Return a tensor of a call with an axis of another size: smaller, or larger by one step
    where it is as small as it can be.
    """
    size = tensor.shape[axis]
    if size > length.least:
        smaller = length.nearest(size // _SMALLER)
        return tensor.narrow(axis, 0, smaller).clone()
    last = tensor.narrow(axis, size - 1, 1)
    more = [last] * length.step
    return torch.cat([tensor, *more], axis)


def _asked_lengths(graph: Graph) -> list[Length]:
    """Return the sizes that `--dynamic` leaves open."""
    return [length for length in graph.lengths if length.is_asked_for]


def _open_sizes(graph: Graph) -> dict[str, str]:
    """Return which sizes a network takes, as `8 or more in steps of 4`, by their names.

    The number of samples is among them if it is fixed.
    """
    sizes: dict[str, str] = {}
    samples = fixed_batch(graph)
    if samples is not None:
        sizes["batch"] = str(samples)
    for length in _asked_lengths(graph):
        sizes[length.name] = str(length)
    return sizes


def tensor_leaves(output: Any) -> list[Tensor]:
    """Return the tensors in a nested output; constants are not part of a file."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


HALF = (torch.float16, torch.bfloat16)


def in_float32(deployment: Deployment) -> Deployment:
    """Return the deployment with float32 for float16 and bfloat16.

    That concerns parameters, the call and casts. Codes and scales stay, and so do the batches
    to verify with. As neither values nor sums are rounded to half precision, outputs are nearer
    to exact arithmetic than test mode's.
    """
    graph = deployment.graph
    if not any(node.dtype in HALF for node in graph.nodes):
        return deployment
    args, kwargs = to_float32(deployment.call)
    nodes = tuple(
        replace(node, attrs=to_float32(dict(node.attrs)), dtype=_widened_leaf(node.dtype))
        for node in graph.nodes
    )
    graph = graph.replaced(nodes=nodes, tensors=to_float32(dict(graph.tensors)))
    solution = deployment.encoded
    tensors = {
        key: replace(tensor, dtype=_widened_leaf(tensor.dtype))
        for key, tensor in solution.tensors.items()
    }
    solution = replace(
        solution,
        tensors=tensors,
        weights=to_float32(_as_dicts(solution.weights)),
        rescaled=to_float32(_as_dicts(solution.rescaled)),
        corrections=to_float32(dict(solution.corrections)),
    )
    return replace(deployment, graph=graph, solution=solution, args=args, kwargs=kwargs)


def to_float32(value: Any) -> Any:
    """Return a nested value with float32 for tensors and dtypes of half precision."""
    return pytree.tree_map(_widened_leaf, value)


def _widened_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return torch.float32 if value in HALF else value


def _as_dicts(by_layer: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return dicts, which pytree maps over."""
    return {layer: dict(tensors) for layer, tensors in by_layer.items()}
