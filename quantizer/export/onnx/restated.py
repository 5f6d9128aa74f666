"""Restates the tensors of a network in the form that the engine of a file has. Weights become
codes of the same values that ONNX Runtime has kernels for, and activations what is rounded.

x86 processors without VNNI multiply uint8 inputs with int8 weights by vpmaddubsw, which adds
two adjacent products in 16 bits. The sum saturates if both weights have the same sign and their
magnitudes add up to more than 128. ONNX Runtime uses it for matrix products, linear layers and
convolutions. Its kernels for depthwise convolutions first widen each product to 32 bits, so
they are right with all weights. They need one zero point for all channels; others are computed
as matrix products.

Source: ONNX Runtime 1.31, onnxruntime/core/mlas/lib: amd64/ConvSymKernelAvx2.asm,
amd64/QgemmU8S8KernelAvx2.asm, intrinsics/avx2/qdwconv_avx2.cpp, and the order of weights in
core/providers/cpu/quantization/qlinearconv.cc.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.config.wording import counted
from quantizer.export.arithmetic import is_multiplied, is_narrow, layer_input_spec
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.integer import LARGEST_PAIR_SUM, largest_pair_sums
from quantizer.option_words import Sentence
from quantizer.plan.axes import is_depthwise
from quantizer.plan.model import Key, TensorSpecs

# The kernels for int8 weights read so many input channels at once.
_CHANNELS_AT_ONCE = 4
# Padding more weights of an output than these takes longer than it saves.
_MAX_ADDED_WEIGHTS = 49
# The kernels for int8 weights compute so many output channels at least.
_MIN_OUTPUTS = 16
# The difference between unsigned and signed codes of 8 bits.
_SIGN_OFFSET = 128


@dataclass(frozen=True)
class WeightStorage:
    """How the 8-bit weights are stored that meet integers, by names of layers.

    Attributes:
        unsigned: as uint8.
        costly: as uint8, although the config asks for scales with which int8 is right. Such
            scales would cost too much, or an algorithm has rounded the weights.
        signed: as int8, and no processor adds up their products wrong.
        unsafe: as int8, and processors without VNNI may add up their products wrong.
    """

    unsigned: list[str] = field(default_factory=list)
    costly: list[str] = field(default_factory=list)
    signed: list[str] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)

    @property
    def processors(self) -> str:
        """Return on which processors the file is right."""
        return "x86 with VNNI, ARM" if self.unsafe else "any"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return a sentence if the processor decides whether results are right, or fast."""
        if self.unsafe:
            return (
                "8-bit weights are stored as int8: x86 CPUs without VNNI compute wrong sums",
            )
        return self.asides

    @property
    def asides(self) -> tuple[str, ...]:
        """Return a sentence if the file is right everywhere, and faster in another form."""
        if self.unsafe or not self.unsigned:
            return ()
        count = len(self.unsigned) + len(self.signed)
        text = (
            f"8-bit weights of {len(self.unsigned)} of {counted(count, 'layer')} are stored as "
            "uint8, so that the file is right on every CPU. "
        )
        if self.costly == self.unsigned:
            text += (
                "With scales for int8 they would lose over 1 dB, or an algorithm has rounded "
                "them"
            )
        else:
            text += (
                "<--onnx_weights int8> is up to twice as fast on CPUs with VNNI, and the range "
                "method pair_safe for weights on every CPU"
            )
        return (Sentence(text),)


def is_right_everywhere(tensor: QuantizedTensor, graph: Graph, node: Node, role: str) -> bool:
    """Return whether no processor saturates in a layer's products of int8 weights with uint8.

    Args:
        tensor: has signed codes.
    """
    assert tensor.codes is not None
    if tensor.codes.dim() == 1:
        # The factors of a batch norm are multiplied, and no products are added.
        return True
    has_one_zero_point = bool(tensor.zero_point.min() == tensor.zero_point.max())
    if role == "weights" and has_one_zero_point and is_depthwise(graph, node):
        return True
    pair_sums = [largest_pair_sums(tensor.codes)]
    missing = missing_channels(tensor.codes.shape, int(node.attrs.get("groups", 1)))
    if missing:
        # Only convolutions between integers are padded
        padded = torch.nn.functional.pad(tensor.codes, (0, 0, 0, 0, 0, missing))
        pair_sums.append(largest_pair_sums(padded))
    return all(int(sums.max()) <= LARGEST_PAIR_SUM for sums in pair_sums)


def missing_channels(shape: Sequence[int], groups: int) -> int:
    """Return how many input channels a convolution in two dimensions is padded with in a file.

    Args:
        shape: of its int8 weights.

    >>> missing_channels((32, 3, 3, 3), 1), missing_channels((32, 1, 3, 3), 32)
    (1, 0)
    """
    if len(shape) != 4 or groups != 1:
        return 0
    outputs, inputs, height, width = shape
    missing = _CHANNELS_AT_ONCE - inputs
    positions = height * width
    has_kernel = outputs >= _MIN_OUTPUTS and outputs % 8 == 0 and positions > 1
    if has_kernel and 0 < missing * positions <= _MAX_ADDED_WEIGHTS:
        return missing
    return 0


def _shifted(tensor: QuantizedTensor, offset: int, *, signed: bool) -> QuantizedTensor:
    """Return the same values with codes of 8 bits that are higher by `offset`."""
    assert tensor.codes is not None
    dtype = torch.int8 if signed else torch.uint8
    wide = tensor.codes.to(torch.int32)
    codes = (wide + offset).to(dtype)
    zero_point = tensor.zero_point + offset
    spec = replace(
        tensor.spec,
        bit_width=8,
        narrow_range=False,
        signed=signed,
        symmetric=tensor.spec.symmetric and offset == 0,
    )
    return replace(tensor, spec=spec, codes=codes, zero_point=zero_point)


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
            if tensor.spec.method == "pair_safe":
                storage.costly.append(layer)
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
    offset = -_SIGN_OFFSET if int(tensor.codes.max()) >= _SIGN_OFFSET else 0
    signed = _shifted(tensor, offset, signed=True)
    # ONNX Runtime multiplies transposed convolutions in float, and OpenVINO misreads their
    # uint8 weights beside inputs from 0 on.
    if weights == "int8" or node.row.transposed:
        return signed
    if weights == "auto" and is_right_everywhere(signed, graph, node, role):
        return signed
    return _shifted(tensor, _SIGN_OFFSET if tensor.spec.signed else 0, signed=False)


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
    sizes = (_FASTEST_BLOCK_SIZE, *PACKED_BLOCK_SIZES)
    block_size = next((size for size in sizes if group_size % size == 0), None)
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
