"""Weights as integer codes with a DequantizeLinear; those that stay float, out of the optimizer's reach. Knows no
network.
"""

from __future__ import annotations

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx_nodes import Emission, Quantization
from quantizer.export.onnx_tensors import INT32, Carrier, carrier_of
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.granularity import from_rows, to_rows

BLOCKS = 21
"""The first operator set whose DequantizeLinear has a block_size."""


def quantize_weights(wanted: Quantization, values: Tensor, name: str, opset: int) -> Emission | None:
    """Codes, scale, zero point and the node that makes `values` of them under `name`; None where floats have to stay.

    Floats stay, exact as they are, in floating-point formats, in groups before operator set 21, and where float32
    cannot compute the value from the code, as of more than 24 bits. `values` are what the codes stand for.
    """
    tensor, spec = wanted.tensor, wanted.tensor.spec
    carrier = _carrier(tensor, opset)
    if carrier is None or tensor.codes is None:
        return None
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    scale, zero_point = tensor.scale.reshape(-1, 1), tensor.zero_point.reshape(-1, 1)
    # As DequantizeLinear computes it: in float32.
    restored = (to_rows(tensor.codes, *cut).to(torch.int64) - zero_point).to(torch.float32) * scale
    if not torch.equal(from_rows(restored, tuple(values.shape), *cut), values):
        return None
    emission = Emission(f"{wanted.layer}.{wanted.role}")
    inputs = [emission.codes("codes", tensor.codes, carrier), emission.constant("scale", _placed(tensor.scale, spec))]
    if carrier is not INT32:
        inputs.append(emission.codes("zero_point", _placed(tensor.zero_point, spec), carrier))
    emission.add("DequantizeLinear", *inputs, output=name, **_attributes(spec, values))
    return emission


def _placed(scales: Tensor, spec: QuantizationSpec) -> Tensor:
    """Scales of groups where ONNX has them: along the axis that is cut."""
    return scales.movedim(-1, spec.ch_axis) if spec.qscheme == "per_group" and spec.ch_axis is not None else scales


def _attributes(spec: QuantizationSpec, values: Tensor) -> dict[str, int]:
    if spec.ch_axis is None:
        return {}
    if spec.qscheme != "per_group":
        return {"axis": spec.ch_axis}
    whole = spec.group_size in (None, -1)
    return {"axis": spec.ch_axis, "block_size": values.shape[spec.ch_axis] if whole else int(spec.group_size or 0)}


def _carrier(tensor: QuantizedTensor, opset: int) -> Carrier | None:
    """The type of the codes; DequantizeLinear takes 32-bit ones without a zero point, and groups from set 21 on."""
    if tensor.spec.dtype != "int" or (tensor.spec.qscheme == "per_group" and opset < BLOCKS):
        return None
    narrow = carrier_of(tensor.spec, opset)
    if narrow is not None or tensor.zero_point.any() or tensor.spec.quant_max > INT32.high:
        return narrow
    return INT32


def keep_float_weights(model: ModelProto) -> None:
    """Make the biases of layers with float weights something that the optimizer cannot look into.

    Between quantized values it would else quantize such weights itself, to 8 bits per tensor. A bias that is computed
    keeps it from that, and DequantizeLinear is never computed ahead.
    """
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    quantized = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type in _CHANNELS and node.input[0] in quantized and node.input[1] in shapes:
            emission = Emission(f"{node.name}.bias")
            zeros = emission.codes("zeros", torch.zeros(_channels(node, shapes[node.input[1]])), INT32)
            bias = emission.add("DequantizeLinear", zeros, emission.constant("one", 1.0))
            if len(node.input) == 3:
                node.input[2] = emission.add("Add", node.input[2], bias)
            else:
                node.input.append(bias)
            model.graph.initializer.extend(emission.initializers)
            nodes += emission.nodes
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
"""The operators in question, and the axis of the weight that their outputs lie along."""


def _channels(node: NodeProto, shape: tuple[int, ...]) -> int:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("transB"):
        return shape[0]
    return shape[_CHANNELS[node.op_type]] * (attributes.get("group", 1) if node.op_type == "ConvTranspose" else 1)
