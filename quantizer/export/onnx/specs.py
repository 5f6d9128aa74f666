"""Restates weights in the form that ONNX Runtime has kernels for, with the same values.

Also finds how the inputs and outputs of layers are quantized.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role
from quantizer.export.onnx.int8_weights import (
    WeightStorage,
    is_right_everywhere,
    with_signed_codes,
    with_unsigned_codes,
)
from quantizer.graph.ir import Graph, Node
from quantizer.graph.origins import maker
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.groups import layout
from quantizer.plan.layout import PART_SCALE, Join, Layout
from quantizer.plan.model import Key, TensorSpecs
from quantizer.plan.readers import values_readers
from quantizer.storage.deferred_tensor import loaded

SpecsByKey = TensorSpecs
PACKED_BLOCK_SIZES = (256, 128, 64, 32, 16)
"""The sizes of groups that MatMulNBits has."""
# Its fastest, for weights that have no groups of their own.
_FASTEST_BLOCK_SIZE = 128


def input_key(layer: str, graph: Graph, specs: SpecsByKey) -> Key | None:
    """Return where a layer's input is quantized: by the layer itself, or where it was made."""
    for key in ((layer, "input"), *_source_keys(layer, graph)):
        if key in specs:
            return key
    return None


def layer_input_spec(layer: str, graph: Graph, specs: SpecsByKey) -> QuantizationSpec | None:
    """Return how a layer's input is quantized."""
    key = input_key(layer, graph, specs)
    return None if key is None else specs[key]


def output_spec(
    layer: str, graph: Graph, specs: SpecsByKey, where: Layout
) -> QuantizationSpec | None:
    """Return how a layer's output is quantized: where `where` has it, or alike by all readers.

    Args:
        where: the graph's layout.
    """
    for name in _quantization_points(layer, where):
        if (name, "activation") in specs:
            return specs[name, "activation"]
        readers = values_readers(graph, name, where.floats)
        reader_specs = {specs.get((reader, "input")) for reader, _ in readers}
        if len(reader_specs) == 1:
            spec = reader_specs.pop()
            if spec is not None:
                return spec
    return None


def is_narrow(spec: QuantizationSpec | None) -> bool:
    """Return whether a spec is of integers that kernels multiply: 8 bits or fewer."""
    return spec is not None and spec.dtype == "int" and spec.bit_width <= 8


def is_multiplied(node: Node) -> bool:
    """Return whether the role "weights" of a layer is the weight of one product."""
    return node.row.kind == "mac"


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


def quantized_apart(graph: Graph, solution: Solution, *, any_rounding: bool) -> Solution:
    """Return the solution with values that only a join reads quantized before it, too.

    The codes are the same, and integer kernels can make them. A rounding that takes operators
    in float would cost more than that brings, so only `any_rounding` includes it.
    """
    tensors = dict(solution.tensors)
    where = layout(graph)
    for join in where.joins.values():
        whole = solution.tensors.get((join.group.point, "activation"))
        if whole is None or not is_narrow(whole.spec) or whole.spec.is_dynamic:
            continue
        is_fast_rounding = any_rounding or whole.spec.round_mode == "half_even"
        if not is_fast_rounding or not _keeps_codes(graph, join):
            continue
        factors = _part_factors(graph, where, join)
        for part in join.alone:
            members = [name for name in part.members if name in factors]
            if members:
                alike = replace(whole, scale=whole.scale / factors[members[0]])
                tensors.setdefault((part.point, "activation"), alike)
    return replace(solution, tensors=tensors)


def _keeps_codes(graph: Graph, join: Join) -> bool:
    """Return whether rounding before a join's activation function gives the same codes."""
    for name in join.group.members:
        node = graph.by_name[name]
        is_exact = node.row.keeps_scale or node.row.cuts or node.op == PART_SCALE
        if name != join.name and not is_exact:
            return False
    return True


def _part_factors(graph: Graph, where: Layout, join: Join) -> dict[str, float]:
    """Return the factors of a join's parts before quantization, by the layer that made them."""
    scaling = graph.by_name[join.group.point]
    factors: dict[str, float] = {}
    if scaling.op != PART_SCALE:
        for part in join.alone:
            factors |= dict.fromkeys(part.members, 1.0)
        return factors
    (value,) = scaling.refs()
    if value not in where.origins:
        return {}
    factor_by_channel = loaded(graph.weight(scaling)).tolist()
    first = 0
    for source, length in where.origins[value].parts:
        factors[source] = factor_by_channel[first]
        first += length
    return factors


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


def _meets_integers(key: Key, spec: QuantizationSpec, graph: Graph, specs: SpecsByKey) -> bool:
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


def _source_keys(layer: str, graph: Graph) -> Iterator[Key]:
    """Yield the outputs of a layer's source, and of those that only hand its value on or join
    parts of it.
    """
    node: Node | None = graph.source(graph.by_name[layer])
    while node is not None:
        role = "input" if node.op == "input" else "activation"
        yield node.name, role
        if node.is_join:
            makers = {maker(graph, name) for name in node.joined()}
            node = graph.by_name[makers.pop()] if len(makers) == 1 else None
        elif node.row.keeps_scale:
            node = graph.source(node)
        else:
            node = None


def _quantization_points(layer: str, where: Layout) -> Iterator[str]:
    """Yield the layers at which a layer's output may be quantized.

    That is with what follows it, or once joined.
    """
    point: str | None = layer
    while point is not None:
        yield point
        point = where.served.get(point)
    for join in where.joins.values():
        if any(layer in part.members for part in join.alone):
            yield join.group.point
