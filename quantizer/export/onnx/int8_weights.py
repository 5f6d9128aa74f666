"""Decides which weights every processor multiplies right as int8.

x86 processors without VNNI multiply uint8 inputs with int8 weights by vpmaddubsw, which adds
two adjacent products in 16 bits. The sum saturates if both weights have the same sign and their
magnitudes add up to more than 128. ONNX Runtime uses it for matrix products, linear layers and
convolutions. Its kernels for depthwise convolutions first widen each product to 32 bits, so
they are right with all weights.

Source: ONNX Runtime 1.31, onnxruntime/core/mlas/lib: amd64/ConvSymKernelAvx2.asm,
amd64/QgemmU8S8KernelAvx2.asm, intrinsics/avx2/qdwconv_avx2.cpp, and the order of weights in
core/providers/cpu/quantization/qlinearconv.cc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto
from torch import Tensor

from quantizer.config.wording import counted
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantized_tensor import QuantizedTensor

# The largest sum of two weights w for which 255 * w fits 16 bits: 255 * 128 = 32640.
_MAX_PAIR_SUM = 128
# The difference between unsigned and signed codes of 8 bits.
_SIGN_OFFSET = 128


@dataclass(frozen=True)
class WeightStorage:
    """How the 8-bit weights are stored that meet integers, by names of layers.

    Attributes:
        unsigned: as uint8.
        signed: as int8, and no processor adds up their products wrong.
        unsafe: as int8, and processors without VNNI may add up their products wrong.
    """

    unsigned: list[str] = field(default_factory=list)
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
        if not self.unsigned:
            return ()
        count = len(self.unsigned) + len(self.signed)
        return (
            f"8-bit weights of {len(self.unsigned)} of {counted(count, 'layer')} are stored as "
            "uint8, so that the file is right on every CPU. On CPUs with VNNI, --onnx_weights "
            "int8 is up to twice as fast",
        )


def is_right_everywhere(tensor: QuantizedTensor, graph: Graph, node: Node, role: str) -> bool:
    """Return whether no processor saturates in a layer's products of int8 weights with uint8.

    Args:
        tensor: has signed codes.
    """
    assert tensor.codes is not None
    if role == "weights" and is_depthwise(graph, node):
        return True
    return largest_pair_sum(tensor.codes) <= _MAX_PAIR_SUM


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Return whether each input channel of a convolution makes one output channel."""
    groups = int(node.attrs.get("groups", 1))
    outputs, inputs_of_group = graph.weight(node).shape[:2]
    return outputs == groups > 1 and inputs_of_group == 1


def largest_pair_sum(codes: Tensor) -> int:
    """Return the largest magnitude of the sum of two weights whose products are added first.

    These are neighbours along the input channels, which the kernels order within each position
    of a convolution's kernel. Two weights of opposite signs cannot saturate. They count with
    the larger magnitude.

    Args:
        codes: [outputs, inputs, ...], integers.

    >>> largest_pair_sum(torch.tensor([[100, 28, -90, 127]]))
    128
    """
    outputs = codes.shape[0]
    inputs = codes.shape[1]
    by_input = codes.to(torch.int32).reshape(outputs, inputs, -1)
    by_position = by_input.transpose(1, 2)
    rows = by_position.reshape(outputs, -1)
    # The kernels fill up the last pair with a zero.
    missing = rows.shape[1] % 2
    rows = torch.nn.functional.pad(rows, (0, missing))
    pairs = rows.reshape(outputs, -1, 2)
    positive_sums = pairs.clamp(min=0).sum(2)
    negative_sums = pairs.clamp(max=0).sum(2)
    highest = int(positive_sums.max())
    lowest = int(negative_sums.min())
    return max(highest, -lowest)


def with_signed_codes(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the same values as int8."""
    assert tensor.codes is not None
    offset = 0
    if int(tensor.codes.max()) >= _SIGN_OFFSET:
        offset = -_SIGN_OFFSET
    return _shifted(tensor, offset, signed=True)


def with_unsigned_codes(tensor: QuantizedTensor) -> QuantizedTensor:
    """Return the same values as uint8."""
    offset = _SIGN_OFFSET if tensor.spec.signed else 0
    return _shifted(tensor, offset, signed=False)


def _shifted(tensor: QuantizedTensor, offset: int, *, signed: bool) -> QuantizedTensor:
    """Return the same values with codes of 8 bits that are higher by `offset`."""
    assert tensor.codes is not None
    dtype = torch.int8 if signed else torch.uint8
    codes = (tensor.codes.to(torch.int32) + offset).to(dtype)
    spec = replace(
        tensor.spec,
        bit_width=8,
        narrow_range=False,
        signed=signed,
        symmetric=tensor.spec.symmetric and offset == 0,
    )
    return replace(tensor, spec=spec, codes=codes, zero_point=tensor.zero_point + offset)


def with_int8_weights(model: ModelProto) -> bytes | None:
    """Return a model with int8 instead of uint8 weights, which computes the same.

    Returns None if it has none, if something else reads them, or if this processor does not
    multiply int8 weights right.
    """
    if not torch.cpu._is_vnni_supported():
        return None
    changed = ModelProto()
    changed.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in changed.graph.initializer}
    unsigned: set[str] = set()
    of_others: set[str] = set()
    for node in changed.graph.node:
        if not _dequantizes_uint8(node, tensors):
            of_others.update(node.input)
            continue
        codes_name, _, zero_point_name = node.input
        unsigned.add(codes_name)
        unsigned.add(zero_point_name)
    if not unsigned or unsigned & of_others:
        return None
    for name in unsigned:
        tensor = tensors[name]
        codes = onnx.numpy_helper.to_array(tensor)
        # The highest bit changes: 128 becomes 0.
        flipped = codes ^ np.uint8(_SIGN_OFFSET)
        signed = flipped.view(np.int8)
        tensor.CopyFrom(onnx.numpy_helper.from_array(signed, name))
    return bytes(changed.SerializeToString())


def _dequantizes_uint8(node: NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Return whether a node dequantizes a constant of uint8."""
    if node.op_type != "DequantizeLinear":
        return False
    codes = tensors.get(node.input[0])
    return codes is not None and codes.data_type == TensorProto.UINT8
