"""Rewrites programs around what LiteRT's converter and kernels lack, with the same values."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from quantizer.export.torch_export.qdq import QUANTIZE

_ATEN = torch.ops.aten
_SQUARES = (
    _ATEN.square.default,
    _ATEN.pow.Tensor_Scalar,
)
_SHARES = (
    _ATEN.softmax.int,
    _ATEN._softmax.default,
    _ATEN.sigmoid.default,
    _ATEN.sigmoid_.default,
)
"""Operators with values from 0 to 1."""
_SIGNED_SHARES = (
    _ATEN.tanh.default,
    _ATEN.tanh_.default,
)
"""Operators with values from -1 to 1."""


def multiply_squares(program: ExportedProgram) -> None:
    """Write squares as products; the converter refuses some powers."""
    for target in _SQUARES:
        for node in program.graph.find_nodes(op="call_function", target=target):
            value, *exponents = node.args
            if exponents not in ([], [2], [2.0]):
                continue
            node.target = _ATEN.mul.Tensor
            node.args = (value, value)
    program.graph_module.recompile()


def keep_scales_of_shares(program: ExportedProgram) -> None:
    """Keep softmax, sigmoid and tanh in float, with the scale of the calibration after them.

    LiteRT's int8 kernels of these have one scale, 1/256 or 1/128, and fail with another. A
    clamp that changes no value keeps the converter from using them.
    """
    for target in _SHARES:
        for node in program.graph.find_nodes(op="call_function", target=target):
            _clamp_before_codes(node, _ATEN.relu.default, ())
    for target in _SIGNED_SHARES:
        for node in program.graph.find_nodes(op="call_function", target=target):
            _clamp_before_codes(node, _ATEN.hardtanh.default, (-1.0, 1.0))
    program.graph_module.recompile()


def _clamp_before_codes(
    node: Node,
    clamp: Any,
    bounds: tuple[float, ...],
) -> None:
    """Insert a clamp between a value and its quantization."""
    graph = node.graph
    for reader in list(node.users):
        if reader.target is not QUANTIZE:
            continue
        with graph.inserting_before(reader):
            clamped = graph.call_function(clamp, (node, *bounds))
        clamped.meta["val"] = node.meta["val"]
        reader.replace_input_with(node, clamped)
