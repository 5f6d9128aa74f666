"""Chooses which activations of an .onnx stay in float, by measuring files on this machine.

torch.onnx translates the network once. For each file only the quantizations are lowered again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import onnx_ir as ir
import torch
from onnx import ModelProto

from quantizer.calibration.fingerprint import input_shapes
from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.errors import UsageError
from quantizer.export.acceptance import failures_named
from quantizer.export.deployment import Deployment
from quantizer.export.layer_choice import DEPLOY_FORMAT, LayerChoice, network_digest
from quantizer.export.onnx.build import NetworkToWrite
from quantizer.export.onnx.lowering import Conventions
from quantizer.export.onnx.restated import with_activations
from quantizer.export.onnx.speed import Feed, float_model
from quantizer.export.onnx.tuned.costs import ProfiledPair, block_milliseconds, measured_costs
from quantizer.export.onnx.tuned.profiles import START, BlockMap, Profile, RuntimeMeter
from quantizer.export.onnx.verify import DEFAULT, HELP, named_inputs
from quantizer.export.performance import Speed
from quantizer.graph.ir import Graph
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import Key

# The gate of a hard-swish is between its ends in inputs of at most this magnitude.
_GATE_END = 3.0
# With fewer codes up to it, the nearest whole number would change the step too much.
_MIN_CODES = 16


def without_activations(
    graph: Graph, solution: Solution, left_out: Collection[Key]
) -> Solution:
    """Return the solution without the activations `left_out`, rounded as kernels of integers
    round: half to even.
    """
    tensors = dict(solution.tensors)
    for key in left_out:
        tensors.pop(key, None)
    for key in _inputs_of_gates(graph):
        if key in tensors:
            tensors[key] = _with_whole_end(tensors[key])
    reduced = replace(solution, tensors=tensors)
    return with_activations(reduced, round_mode="half_even")


def _inputs_of_gates(graph: Graph) -> Iterator[Key]:
    """Yield the activations that only a hard-swish reads."""
    for node in graph.nodes:
        source = graph.source(node) if node.op == "hardswish" else None
        if source is not None and graph.consumers[source.name] == (node.name,):
            yield source.name, "activation"


def _with_whole_end(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return an input of a hard-swish with a step that divides 3, if its codes reach -3.

    The gate is then a Clip of these codes, without any error.
    """
    spec = tensor.spec
    is_static_integer = spec.dtype == "int" and not spec.is_dynamic
    if not is_static_integer or spec.scale_type != "float":
        return tensor
    if tensor.scale.numel() != 1:
        return tensor
    count = round(_GATE_END / float(tensor.scale))
    if count < _MIN_CODES or int(tensor.zero_point) - spec.quant_min < count:
        return tensor
    return replace(tensor, scale=torch.full_like(tensor.scale, _GATE_END / count))


def activation_keys(solution: Solution) -> tuple[Key, ...]:
    """Return the layer and role of each quantized activation."""
    return tuple((layer, role) for layer, role in solution.tensors if not is_parameter(role))


METER: Callable[[int | None], RuntimeMeter] = RuntimeMeter
"""Returns an object that measures files on some threads. Tests put another one here."""
_MOST_SAMPLES = 10
"""The most samples of the larger batch that is measured. The smaller one has one sample."""
_ATTEMPTS = 3
_INTEGERS = "all in integers"
_FLOATS = "all activations in float"
_LEAST_RATIO = 1.0
"""The least speed, as a ratio to that of float, that a file must reach with each batch."""
_CLEARLY = 1.05
"""By so much a file has to be faster than one in integers, if integers are kept."""


@dataclass(frozen=True)
class _Trial:
    """A file that could be chosen.

    Attributes:
        floats: the blocks that stay in float.
        left_out: the activations that are not quantized.
        speeds: for each batch; empty before they are measured.
    """

    floats: frozenset[str]
    left_out: frozenset[Key]
    speeds: tuple[Speed, ...] = ()

    @property
    def mean_speed(self) -> float:
        """Return the geometric mean of the speeds."""
        ratios = [speed.ratio for speed in self.speeds]
        mean: float = prod(ratios) ** (1 / len(ratios))
        return mean


class Tuner:
    """Measures the files of one network.

    Args:
        deployment: a network with all its quantizations.
        weights: the value of --onnx_weights.
        conventions: of the profile.

    Raises:
        UsageError: the network is too large to measure.
        VerificationError: ONNX Runtime cannot run a file.
    """

    def __init__(self, deployment: Deployment, weights: str, conventions: Conventions) -> None:
        self.name = f"{deployment.graph.model}.onnx"
        self.weights = weights
        self.conventions = conventions
        self.meter = METER(1 if conventions.keeps_integers else None)
        to_write = NetworkToWrite.of(deployment, weights, conventions)
        # A file with fewer quantizations could do with an older operator set
        self.deployment = replace(deployment, opset=to_write.opset)
        self.quantizations = to_write.quantizations
        model = to_write.translated()
        floating = float_model(model)
        if floating is None:
            raise UsageError(
                "<--onnx_profile tuned> cannot measure a network of more than 1 GB",
                help="use <--onnx_profile fast>",
            )
        self.floating = floating
        self.translated = ir.to_proto(model)
        self.keys = activation_keys(deployment.solution)
        quantized = self.file(())
        bare = self.file(self.keys)
        self.quantized_blocks = BlockMap(quantized)
        self.bare_blocks = BlockMap(bare)
        self.sizes, self.feeds = _feeds(deployment, quantized)
        self.pairs: list[ProfiledPair] = []
        for size, feed in zip(self.sizes, self.feeds, strict=True):
            in_integers = self._profile(quantized, feed)
            in_float = self._profile(bare, feed)
            elements = partial(_elements, deployment.graph, size)
            pair = ProfiledPair(in_integers, in_float, elements)
            self.pairs.append(pair)

    def file(self, left_out: Collection[Key]) -> ModelProto:
        """Return the file that leaves the activations `left_out` in float.

        Its biases are those of the network with all quantizations. Their values do not change
        how long the file takes.
        """
        deployment = self.deployment
        solution = without_activations(deployment.graph, deployment.solution, left_out)
        deployment = replace(deployment, solution=solution)
        to_write = NetworkToWrite.of(deployment, self.weights, self.conventions)
        stated = to_write.stated.tensors
        # Marks refer to quantizations by index, so an absent one keeps its place in the list
        quantizations = [(key, stated.get(key, tensor)) for key, tensor in self.quantizations]
        absent = {key for key, _ in quantizations if key not in stated}
        model = ir.from_proto(self.translated)
        return to_write.lowered(model, quantizations, absent)

    def _profile(self, model: ModelProto, feed: Feed) -> Profile:
        content = model.SerializeToString()
        with failures_named(DEFAULT, self.name, HELP):
            return self.meter.profile(content, feed)

    def choice(self) -> LayerChoice:
        """Return what the fastest file leaves in float.

        Raises:
            UsageError: the machine is too busy to measure.
            VerificationError: ONNX Runtime cannot run a file.
        """
        trials = self._measured(self._trials())
        if self.conventions.keeps_integers:
            fastest = fastest_with_integers(trials)
        else:
            fastest = fastest_trial(trials)
        left_out = sorted(fastest.left_out)
        times = block_milliseconds(self.pairs, self.quantized_blocks, self.bare_blocks)
        float_layers = {name: times[name] for name in sorted(fastest.floats - {START})}
        content = {
            "format": DEPLOY_FORMAT,
            "target": "onnx",
            "network": network_digest(self.deployment.graph, self.deployment.solution),
            "weights": self.weights,
            "measured": {**self.meter.conditions, "batches": list(self.sizes)},
            "float_activations": [list(key) for key in left_out],
            "float_is_faster": trials[-1].mean_speed > _CLEARLY * fastest.mean_speed,
            "float_layers": float_layers,
            "speeds": {
                "chosen": _ratios(fastest),
                _INTEGERS: _ratios(trials[0]),
                _FLOATS: _ratios(trials[-1]),
            },
        }
        deployment = self.deployment
        solution = without_activations(deployment.graph, deployment.solution, left_out)
        return LayerChoice(solution, content)

    def _trials(self) -> list[_Trial]:
        """Return the files to compare: in integers, then choices, then the one in float."""
        trials = [_Trial(frozenset(), frozenset())]
        known = {frozenset(), frozenset(self.keys)}
        batches: list[Sequence[ProfiledPair]] = [self.pairs]
        if len(self.pairs) > 1:
            batches += [[pair] for pair in self.pairs]
        for pairs in batches:
            costs = measured_costs(pairs, self.quantized_blocks, self.bare_blocks, self.keys)
            for floats in costs.choices():
                left_out = costs.left_out(floats)
                if left_out not in known:
                    known.add(left_out)
                    trials.append(_Trial(floats, left_out))
        every_block = frozenset(self.quantized_blocks.names)
        trials.append(_Trial(every_block, frozenset(self.keys)))
        return trials

    def _measured(self, trials: Sequence[_Trial]) -> list[_Trial]:
        """Return the trials with their speeds.

        Raises:
            UsageError: the machine is too busy.
        """
        models = [self.file(trial.left_out).SerializeToString() for trial in trials]
        measured = list(trials)
        for feed in self.feeds:
            speeds = self._clear_speeds(models, feed)
            for index, speed in enumerate(speeds):
                trial = measured[index]
                measured[index] = replace(trial, speeds=(*trial.speeds, speed))
        return measured

    def _clear_speeds(self, models: Sequence[bytes], feed: Feed) -> list[Speed]:
        """Return the speeds of files whose rounds agree. If integers are kept, processor times
        are measured, which hardly depend on other programs.

        Raises:
            UsageError: they do not, however often they are measured.
        """
        for _ in range(_ATTEMPTS):
            with failures_named(DEFAULT, self.name, HELP):
                speeds = self.meter.speeds(models, self.floating, feed)
            are_clear = all(speed.is_clear for speed in speeds)
            is_usable = are_clear or self.conventions.keeps_integers
            if is_usable and len(speeds) == len(models):
                return speeds
        raise UsageError(
            "<--onnx_profile tuned> cannot choose: the machine is too busy to measure files",
            help="run it when nothing else runs, or give a deploy.json with <--deploy_file>",
        )


def fastest_trial(trials: Sequence[_Trial]) -> _Trial:
    """Return the trial with the highest geometric mean of its speeds with all batches.

    One that is slower than float with a batch is not chosen. If all are, it is the last one,
    which computes in float.
    """
    never_slower = []
    for trial in trials:
        if min(speed.ratio for speed in trial.speeds) >= _LEAST_RATIO:
            never_slower.append(trial)
    return max(never_slower, key=lambda trial: trial.mean_speed, default=trials[-1])


def fastest_with_integers(trials: Sequence[_Trial]) -> _Trial:
    """Return the trial with the highest geometric mean of its speeds, except the last trial,
    which computes in float. It is the first one, all in integers, unless another is clearly
    faster.
    """
    all_in_integers = trials[0]
    fastest = max(trials[:-1], key=lambda trial: trial.mean_speed)
    if fastest.mean_speed > _CLEARLY * all_in_integers.mean_speed:
        return fastest
    return all_in_integers


def _ratios(trial: _Trial) -> list[float]:
    """Return the speeds of a trial against float, for each batch."""
    return [round(speed.ratio, 3) for speed in trial.speeds]


def _feeds(deployment: Deployment, model: ModelProto) -> tuple[list[int], list[Feed]]:
    """Return the sizes of the batches to measure, and the inputs of each, by name.

    The sizes are one sample and up to ten. A model with a fixed batch has only that one.
    """
    feed = named_inputs(model, deployment, deployment.call)
    shapes = [shape for shape in input_shapes(deployment.graph) if shape is not None]
    axes = {
        name: shape.index(None)
        for name, shape in zip(deployment.input_names, shapes, strict=True)
        if name in feed and None in shape
    }
    if not axes:
        return [1], [feed]
    larger = min(_MOST_SAMPLES, *(feed[name].shape[axis] for name, axis in axes.items()))
    sizes = sorted({1, larger})
    feeds: list[Feed] = []
    for size in sizes:
        cut = {name: feed[name].take(range(size), axis) for name, axis in axes.items()}
        feeds.append({**feed, **cut})
    return sizes, feeds


def _elements(graph: Graph, samples: int, key: Key) -> int:
    """Return how many values an activation has for a number of samples."""
    layer, role = key
    node = graph.by_name[layer]
    if role != "activation" and node.op != "input":
        source = node.input_roles()[role]
        node = graph.by_name[source]
    elements = 1
    for size in node.shape or ():
        elements *= samples if size is None else size
    return elements
