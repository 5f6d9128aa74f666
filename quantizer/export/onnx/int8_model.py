"""Writes the same model with int8 weights, to measure how fast it would be."""

from collections.abc import Mapping

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto

# The difference between unsigned and signed codes of 8 bits: the highest bit.
_HIGHEST_BIT = np.uint8(128)


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
        flipped = codes ^ _HIGHEST_BIT
        signed = flipped.view(np.int8)
        tensor.CopyFrom(onnx.numpy_helper.from_array(signed, name))
    return bytes(changed.SerializeToString())


def _dequantizes_uint8(node: NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Return whether a node dequantizes a constant of uint8."""
    if node.op_type != "DequantizeLinear":
        return False
    codes = tensors.get(node.input[0])
    return codes is not None and codes.data_type == TensorProto.UINT8
