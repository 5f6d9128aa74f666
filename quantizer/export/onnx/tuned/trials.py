"""Builds files of one network that leave different activations in float.

torch.onnx translates the network once. For each file only the quantizations are lowered again.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import onnx_ir as ir
import torch
from onnx import ModelProto

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.export.deployment import Deployment
from quantizer.export.onnx.build import NetworkToWrite
from quantizer.export.onnx.conventions import Conventions
from quantizer.export.onnx.restated import with_activations
from quantizer.export.onnx.speed import float_model
from quantizer.graph.ir import Graph
from quantizer.nn.quantized_tensor import QuantizedTensor
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
    keys: list[Key] = []
    for layer, role in solution.tensors:
        if not is_parameter(role):
            keys.append((layer, role))
    return tuple(keys)


class TrialFiles:
    """Builds files of a network whose speeds are compared.

    Args:
        deployment: the network with all its quantizations.
        weights: the value of --onnx_weights.
        conventions: those of `--onnx_profile`.

    Attributes:
        floating: the network without any quantization, as a serialized ModelProto; None if it
            has more than 1 GB.
    """

    def __init__(self, deployment: Deployment, weights: str, conventions: Conventions) -> None:
        self._weights = weights
        self._conventions = conventions
        to_write = NetworkToWrite.of(deployment, weights, conventions)
        # A file with fewer quantizations could do with an older operator set
        self._deployment = replace(deployment, opset=to_write.opset)
        self._quantizations = to_write.quantizations
        model = to_write.translated()
        self.floating = float_model(model)
        self._translated = ir.to_proto(model)

    def file(self, left_out: Collection[Key]) -> ModelProto:
        """Return the file that leaves the activations `left_out` in float.

        Its biases are those of the network with all quantizations. Their values do not change
        how long the file takes.
        """
        deployment = self._deployment
        solution = without_activations(deployment.graph, deployment.solution, left_out)
        deployment = replace(deployment, solution=solution)
        to_write = NetworkToWrite.of(deployment, self._weights, self._conventions)
        stated = to_write.stated.tensors
        quantizations: list[tuple[Key, QuantizedTensor]] = []
        absent: set[Key] = set()
        # Marks refer to quantizations by index, so an absent one keeps its place in the list
        for key, tensor in self._quantizations:
            if key not in stated:
                absent.add(key)
            restated = stated.get(key, tensor)
            quantizations.append((key, restated))
        model = ir.from_proto(self._translated)
        return to_write.lowered(model, quantizations, absent)
