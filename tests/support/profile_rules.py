"""The rules of TensorRT and of NPUs about a file with QuantizeLinear and DequantizeLinear, read
from the file alone.

Sources: the pages of NVIDIA on explicit quantization, of ONNX Runtime on the QNN execution
provider, and of AMD on power-of-two scales for Vitis AI.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Expand", "Gather")
CODES = (
    TensorProto.INT4,
    TensorProto.UINT4,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT16,
    TensorProto.UINT16,
)
OUTPUT_AXES = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0, "MatMul": 1}


@dataclass
class File:
    """A model with its links."""

    model: ModelProto

    def __post_init__(self) -> None:
        self.constants = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.producers = {name: node for node in self.nodes() for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes():
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    @classmethod
    def read(cls, path: Path) -> File:
        return cls(onnx.load(path))

    def nodes(self, *op_types: str) -> Iterator[NodeProto]:
        for node in self.model.graph.node:
            if not op_types or node.op_type in op_types:
                yield node

    def array(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(self.constants[name])

    def dequantize(self, name: str) -> NodeProto | None:
        """Return the DequantizeLinear that makes a value."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def origin(self, name: str) -> NodeProto | None:
        """Return the DequantizeLinear that a value comes from by moves alone."""
        node = self.producers.get(name)
        while node is not None and node.op_type in MOVES:
            node = self.producers.get(node.input[0])
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def weight(self, product: NodeProto) -> NodeProto | None:
        """Return the DequantizeLinear of a product's stored weight.

        A constant activation, such as rows divided by their norm, has the type of activations.
        """
        node = self.dequantize(product.input[1])
        if node is None or ".activation." in node.input[1]:
            return None
        return node if node.input[0] in self.constants else None

    def zero_point(self, node: NodeProto) -> TensorProto:
        return self.constants[node.input[2]]

    def scale_is_a_power(self, node: NodeProto) -> bool:
        mantissas, _ = np.frexp(self.array(node.input[1]))
        return bool((mantissas == 0.5).all())


def common_faults(file: File) -> Iterator[str]:
    """Yield what neither TensorRT nor an NPU takes."""
    for node in file.nodes():
        if node.domain:
            yield f"{node.name} is of the domain {node.domain}"
    for node in file.nodes("QuantizeLinear"):
        for reader in file.readers.get(node.output[0], ()):
            if reader.op_type != "DequantizeLinear" or reader.input[1:] != node.input[1:]:
                yield f"{reader.name} reads the codes of {node.name}"
        if file.array(node.input[1]).ndim:
            yield f"{node.name} has a scale per channel"
    for node in file.nodes("DequantizeLinear"):
        maker = file.producers.get(node.input[0])
        if maker is not None and maker.op_type != "QuantizeLinear":
            yield f"{node.name} dequantizes what {maker.op_type} makes"
        if maker is None and node.input[0] not in file.constants:
            yield f"{node.name} dequantizes an input"
    for name, tensor in file.constants.items():
        for reader in file.readers.get(name, ()):
            if tensor.data_type in CODES and "Linear" not in reader.op_type:
                yield f"{reader.name} reads the codes {name}"


def weight_faults(file: File, node: NodeProto) -> Iterator[str]:
    """Yield what is wrong about the weight of a product, if it has one."""
    weight = file.weight(node)
    if weight is None:
        return
    zero_point = file.zero_point(weight)
    if zero_point.data_type != TensorProto.INT8 or file.array(weight.input[2]).any():
        yield f"the weight of {node.name} is not int8 with zero points of 0"
    axes = [attribute.i for attribute in weight.attribute if attribute.name == "axis"]
    if file.array(weight.input[1]).ndim and axes != [OUTPUT_AXES[node.op_type]]:
        yield f"the weight of {node.name} has scales along {axes}"


def tensorrt_faults(file: File) -> list[str]:
    """Return what TensorRT refuses, or what keeps it from integers."""
    faults = [*common_faults(file)]
    for node in file.nodes("QuantizeLinear", "DequantizeLinear"):
        zero_point = file.zero_point(node)
        if zero_point.data_type != TensorProto.INT8 or file.array(node.input[2]).any():
            faults.append(f"{node.name} is not int8 with the zero point 0")
    for node in file.nodes(*PRODUCTS):
        faults += weight_faults(file, node)
        if file.weight(node) is not None and file.origin(node.input[0]) is None:
            faults.append(f"the input of {node.name} is not quantized beside its weight")
        if len(node.input) > 2 and file.dequantize(node.input[2]) is not None:
            faults.append(f"the bias of {node.name} is dequantized")
    for node in file.nodes("DequantizeLinear"):
        is_weight = ".weights" in node.name
        for reader in file.readers.get(node.output[0], ()):
            if is_weight and reader.op_type not in PRODUCTS:
                faults.append(f"{reader.name} reads a dequantized weight")
    return faults


def npu_faults(file: File, *, powers: bool = False) -> list[str]:
    """Return what keeps the execution providers from an operator in integers.

    Args:
        powers: whether all scales have to be powers of two, with codes that are signed.
    """
    faults = [*common_faults(file)]
    kinds = (TensorProto.UINT8, TensorProto.UINT16)
    if powers:
        kinds = (TensorProto.INT8, TensorProto.INT16)
    for node in file.nodes("QuantizeLinear"):
        if file.zero_point(node).data_type not in kinds:
            faults.append(f"{node.name} has codes of another type")
        if powers and file.array(node.input[2]).any():
            faults.append(f"{node.name} has a zero point")
    for node in file.nodes("QuantizeLinear", "DequantizeLinear"):
        if powers and not file.scale_is_a_power(node):
            faults.append(f"{node.name} has a scale that is no power of two")
    for node in file.nodes(*PRODUCTS):
        faults += weight_faults(file, node)
        faults += product_faults(file, node)
    for node in file.nodes(*MOVES):
        if file.dequantize(node.input[0]) is not None:
            for name in node.output:
                readers = file.readers.get(name, ())
                if any(reader.op_type != "QuantizeLinear" for reader in readers):
                    faults.append(f"{node.name} makes floats of codes")
    return faults


def product_faults(file: File, node: NodeProto) -> Iterator[str]:
    """Yield what is wrong about the operands of a product with a stored weight."""
    weight = file.weight(node)
    if weight is None:
        return
    x = file.dequantize(node.input[0])
    if x is None:
        yield f"the input of {node.name} is not quantized"
        return
    # A bias that is computed belongs to the user's own product
    has_bias = len(node.input) > 2 and file.producers.get(node.input[2]) is None
    has_bias |= len(node.input) > 2 and file.dequantize(node.input[2]) is not None
    if not has_bias:
        return
    bias = file.dequantize(node.input[2])
    if bias is None or file.zero_point(bias).data_type != TensorProto.INT32:
        yield f"the bias of {node.name} is not int32"
        return
    step = file.array(x.input[1]) * file.array(weight.input[1])
    if not np.array_equal(file.array(bias.input[1]), step) or file.array(bias.input[2]).any():
        yield f"the bias of {node.name} is not in steps of its sums"
