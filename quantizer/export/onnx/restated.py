"""Restates the tensors of a network in the form that the engine of a file has: weights as codes
that ONNX Runtime has kernels for, with the same values, and activations as they are rounded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export.arithmetic.operands import is_multiplied, is_narrow, layer_input_spec
from quantizer.export.onnx.int8_weights import (
    WeightStorage,
    is_right_everywhere,
    with_signed_codes,
    with_unsigned_codes,
)
from quantizer.graph.ir import Graph
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key, TensorSpecs

PACKED_BLOCK_SIZES = (256, 128, 64, 32, 16)
"""The sizes of groups that MatMulNBits has."""
# Its fastest, for weights that have no groups of their own.
_FASTEST_BLOCK_SIZE = 128


def with_activations(solution: Solution, **changes: Any) -> Solution:
    """Return the solution with other values of fields in the specs of activations.

    QuantizeLinear rounds half to even, and cuts values off at the ends of the type. So codes at
    half-way points change.
    """
    tensors = dict(solution.tensors)
    for (layer, role), tensor in solution.tensors.items():
        if not is_parameter(role):
            spec = replace(tensor.spec, **changes)
            tensors[layer, role] = replace(tensor, spec=spec)
    return replace(solution, tensors=tensors)


def signed_weights(graph: Graph, solution: Solution) -> Solution:
    """Return the solution with the weights of products as codes of int8."""
    tensors = dict(solution.tensors)
    for (layer, role), tensor in solution.tensors.items():
        is_product = role == "weights" and is_multiplied(graph.by_name[layer])
        if is_product and is_narrow(tensor.spec):
            tensors[layer, role] = _for_integers(tensor, "int8", graph, (layer, role))
    return replace(solution, tensors=tensors)


def adapt_weights(
    graph: Graph, solution: Solution, weights: str, *, packed: bool = False
) -> Solution:
    """Return the solution with weights in the form that ONNX Runtime's kernels take.

    With quantized inputs that is one scale, or one for each channel, with codes of 8 bits. With
    float inputs it is groups of at most 256, for 4 bits or fewer or if codes will be `packed`,
    and otherwise a scale for each channel.

    Args:
        weights: the type of 8-bit codes: "int8", "uint8", or "auto" for int8 in the layers
            that every processor multiplies right.
    """
    specs = solution.specs
    tensors = dict(solution.tensors)
    for key, tensor in solution.tensors.items():
        node = graph.by_name[key[0]]
        if _meets_integers(key, tensor.spec, graph, specs):
            tensors[key] = _for_integers(tensor, weights, graph, key)
        elif key[1] == "weights" and node.row.kind == "mac" and is_narrow(tensor.spec):
            shape = graph.weight(node).shape
            if len(shape) == 2:
                tensors[key] = _for_floats(tensor, *shape, packed=packed)
    return replace(solution, tensors=tensors)


def weight_storage(graph: Graph, solution: Solution) -> WeightStorage:
    """Return how the weights that meet integers are stored."""
    storage = WeightStorage()
    for key, tensor in solution.tensors.items():
        layer, role = key
        node = graph.by_name[layer]
        if node.row.transposed or tensor.codes is None:
            continue
        if not _meets_integers(key, tensor.spec, graph, solution.specs):
            continue
        if tensor.codes.dtype == torch.uint8:
            storage.unsigned.append(layer)
        elif is_right_everywhere(tensor, graph, node, role):
            storage.signed.append(layer)
        else:
            storage.unsafe.append(layer)
    return storage


def _meets_integers(key: Key, spec: QuantizationSpec, graph: Graph, specs: TensorSpecs) -> bool:
    """Return whether a weight meets integers, or may, as in recurrent layers."""
    layer, role = key
    if base_role(role) != "weights" or not is_narrow(spec) or spec.qscheme == "per_group":
        return False
    if graph.by_name[layer].row.kind != "mac":
        return False
    if role != "weights":
        return spec.bit_width == 8
    return is_narrow(layer_input_spec(layer, graph, specs))


def _for_integers(
    tensor: QuantizedTensor, weights: str, graph: Graph, key: Key
) -> QuantizedTensor:
    """Return a weight with codes of 8 bits.

    Args:
        weights: as for `adapt_weights`.
    """
    if tensor.codes is None:
        spec = replace(tensor.spec, bit_width=8, narrow_range=False)
        return replace(tensor, spec=spec)
    layer, role = key
    node = graph.by_name[layer]
    signed = with_signed_codes(tensor)
    # ONNX Runtime multiplies transposed convolutions in float, and OpenVINO misreads their
    # uint8 weights beside inputs from 0 on.
    if weights == "int8" or node.row.transposed:
        return signed
    if weights == "auto" and is_right_everywhere(signed, graph, node, role):
        return signed
    return with_unsigned_codes(tensor)


def _for_floats(
    tensor: QuantizedTensor, outputs: int, inputs: int, *, packed: bool
) -> QuantizedTensor:
    """Return a linear layer's weight in the form that is multiplied with floats, if any."""
    spec = tensor.spec
    is_grouped = spec.qscheme == "per_group"
    if spec.ch_axis not in (None, 1 if is_grouped else 0):
        return tensor
    group_size = spec.group_size
    if not is_grouped or group_size is None or group_size == -1:
        group_size = inputs
    block_size: int | None = None
    for size in (_FASTEST_BLOCK_SIZE, *PACKED_BLOCK_SIZES):
        if group_size % size == 0:
            block_size = size
            break
    is_wide = spec.bit_width > 4 and not packed
    if group_size == inputs and (block_size is None or is_wide):
        by_channel = replace(spec, qscheme="per_channel", ch_axis=0, group_size=None)
        return _rescaled(tensor, by_channel, lambda scales: scales.expand(outputs, 1)[:, 0])
    if group_size in PACKED_BLOCK_SIZES or block_size is None:
        return tensor
    count = group_size // block_size
    in_blocks = replace(spec, qscheme="per_group", ch_axis=1, group_size=block_size)
    return _rescaled(
        tensor, in_blocks, lambda scales: scales.expand(outputs, -1).repeat_interleave(count, 1)
    )


def _rescaled(
    tensor: QuantizedTensor, spec: QuantizationSpec, spread: Callable[[Tensor], Tensor]
) -> QuantizedTensor:
    """Return the same codes with scales and zero points in another shape.

    Args:
        spread: is given [outputs or 1, groups].
    """

    def reshaped(values: Tensor) -> Tensor:
        outputs = values.shape[0] if values.dim() else 1
        return spread(values.reshape(outputs, -1)).contiguous()

    return replace(
        tensor, spec=spec, scale=reshaped(tensor.scale), zero_point=reshaped(tensor.zero_point)
    )
