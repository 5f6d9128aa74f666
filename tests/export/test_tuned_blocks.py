"""Blocks of `--onnx_profile tuned`: which layer the nodes of an optimized graph belong to."""

from __future__ import annotations

import pytest

for package in ("onnx", "onnxruntime"):
    pytest.importorskip(package, reason="files are written with it (extra: onnx)")

import onnx

from quantizer.export.onnx.tuned.profiles import BlockMap, Kernel, Profile


def chain(*nodes: tuple[str, str, str, str]) -> onnx.ModelProto:
    """Return a model of nodes of one input and one output; each is (operator, name, from, to)."""
    made = [
        onnx.helper.make_node(operator, [source], [target], name=name)
        for operator, name, source, target in nodes
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 8, 8])
    return onnx.helper.make_model(onnx.helper.make_graph(made, "net", [x], []))


def test_what_the_optimizer_adds_costs_the_layer_that_it_serves() -> None:
    blocks = BlockMap(
        chain(("Conv", "first", "x", "middle"), ("Conv", "second", "middle", "y"))
    )
    optimized = chain(
        ("ReorderInput", "reorder", "x", "x_blocked"),
        ("Conv", "first_nchwc", "x_blocked", "middle_blocked"),
        ("ReorderOutput", "reorder_back", "middle_blocked", "middle_plain"),
        ("Transpose", "transpose", "middle_plain", "middle_last"),
        ("Conv", "second", "middle_last", "y"),
    )
    kernels = [
        Kernel(node.name, node.op_type, float(10**place), 1)
        for place, node in enumerate(optimized.graph.node)
    ]
    seconds = blocks.seconds(Profile(optimized, tuple(kernels)))
    assert seconds == {"first": 111.0, "second": 11000.0}
