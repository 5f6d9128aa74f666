"""Builds files that leave different activations in float, of a network translated once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir
from onnx import ModelProto

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.export.deployment import Deployment
from quantizer.export.onnx.build import NetworkToWrite
from quantizer.export.onnx.conventions import Conventions
from quantizer.export.onnx.profile import rounded_half_even
from quantizer.export.onnx.speed import float_model
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key


def without_activations(
    solution: Solution,
    left_out: Collection[Key],
) -> Solution:
    """Return the solution with activations in float, and the others rounded half to even."""
    tensors = dict(solution.tensors)
    for key in left_out:
        tensors.pop(key, None)
    reduced = replace(solution, tensors=tensors)
    return rounded_half_even(reduced)


def activation_keys(
    solution: Solution,
) -> tuple[Key, ...]:
    """Return the quantized activations."""
    keys: list[Key] = []
    for layer, role in solution.tensors:
        if not is_parameter(role):
            keys.append((layer, role))
    return tuple(keys)


class TrialFiles:
    """The files of a network, for times.

    Args:
        deployment: the network with all its quantizations.
        weights: the value of --onnx_weights.
        conventions: of the profile.

    Attributes:
        floating: the network without any quantization, serialized; None if it is large.
    """

    def __init__(
        self,
        deployment: Deployment,
        weights: str,
        conventions: Conventions,
    ) -> None:
        self._weights = weights
        self._conventions = conventions
        whole = NetworkToWrite.of(deployment, weights, conventions)
        self._deployment = replace(deployment, opset=whole.opset)
        self._quantizations = whole.quantizations
        model = whole.translated()
        self.floating = float_model(model)
        self._translated = ir.to_proto(model)

    def file(
        self,
        left_out: Collection[Key],
    ) -> ModelProto:
        """Return the file that leaves these activations in float.

        Biases are those of the whole solution, which takes no time.
        """
        solution = without_activations(self._deployment.solution, left_out)
        deployment = replace(self._deployment, solution=solution)
        to_write = NetworkToWrite.of(deployment, self._weights, self._conventions)
        stated = to_write.stated.tensors
        quantizations: list[tuple[Key, QuantizedTensor]] = []
        absent: set[Key] = set()
        for key, tensor in self._quantizations:
            if key not in stated:
                absent.add(key)
            restated = stated.get(key, tensor)
            quantizations.append((key, restated))
        model = ir.from_proto(self._translated)
        return to_write.lowered(model, quantizations, absent)
