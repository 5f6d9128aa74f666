"""Compares the codes of every layer in a default ONNX Runtime session with test mode's, each given the same input."""

from collections.abc import Mapping
from typing import Any

import onnx
import torch
from onnx import ModelProto
from torch import Tensor

from quantizer.engine.exact import LayerCodes
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key

Tensors = Mapping[Key, QuantizedTensor]


def code_values(model: ModelProto, tensors: Tensors) -> dict[Key, str]:
    """The values that hold codes of activations, by what they are the codes of."""
    makers = {name: node for node in model.graph.node for name in node.output}
    found: dict[Key, str] = {}
    for node in model.graph.node:
        layer, _, rest = node.name.rpartition("::")
        if node.op_type == "DequantizeLinear" and node.input[0] in makers:
            found |= {key: node.input[0] for key in tensors if node.name.startswith(f"{key[0]}.{key[1]}.")}
    return found
