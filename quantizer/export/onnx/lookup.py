"""Rows of a quantized table that are looked up: of its codes, so that no call dequantizes the
whole of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper

from quantizer.export.onnx.linear import readers_of
from quantizer.export.onnx.nodes import Emission

_PICKED = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32)
"""The types of codes that ONNX Runtime's Gather takes."""


def looked_up(model: ModelProto, nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes, with every Gather of rows of a dequantized table made one of its codes, which
    are dequantized then.

    ONNX Runtime computes neither ahead, as it keeps DequantizeLinear for its kernels, nor one
    after the other by rows.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = readers_of(nodes)
    tables = {
        node.output[0]: _Table(node, constants)
        for node in nodes
        if node.op_type == "DequantizeLinear"
        and node.input[0] in constants
        and constants[node.input[0]].data_type in _PICKED
        and _is_by_row(node)
        and all(_is_lookup(reader, node.output[0]) for reader in readers[node.output[0]])
    }
    found: list[NodeProto] = []
    for node in nodes:
        table = tables.get(node.input[0]) if _is_lookup(node, *node.input[:1]) else None
        if table is None:
            found += [] if node.output[0] in tables else [node]
            continue
        emission = table.rows(node)
        model.graph.initializer.extend(emission.initializers)
        found += emission.nodes
    return found


def _is_by_row(node: NodeProto) -> bool:
    """Whether no block of scales goes over several rows."""
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    return "block_size" not in attributes or attributes["axis"] in (1, -1)


def _is_lookup(node: NodeProto, table: str = "") -> bool:
    """Whether a node picks rows of `table` and does nothing else with it."""
    axis = next(
        (helper.get_attribute_value(each) for each in node.attribute if each.name == "axis"), 0
    )
    return bool(
        node.op_type == "Gather"
        and axis == 0
        and node.input[0] == table
        and node.input[1] != table
    )


@dataclass(frozen=True)
class _Table:
    """A DequantizeLinear of a table [rows, features]."""

    node: NodeProto
    constants: Mapping[str, TensorProto]

    def rows(self, lookup: NodeProto) -> Emission:
        """The rows that a Gather gives, from codes that are picked, and scales where rows have
        their own.
        """
        attributes = {
            each.name: helper.get_attribute_value(each) for each in self.node.attribute
        }
        (codes, *grid), (_, indices), (result,) = self.node.input, lookup.input, lookup.output
        emission = Emission(f"{result}.rows")
        picked = emission.add("Gather", codes, indices)
        by_rows = len(self.constants[grid[0]].dims) == 2 or (
            self.constants[grid[0]].dims and attributes["axis"] == 0
        )
        if not by_rows:
            emission.add(
                "DequantizeLinear", picked, *grid, output=result, **attributes | {"axis": -1}
            )
            return emission
        scale, *zero = [emission.add("Gather", each, indices) for each in grid]
        if "block_size" in attributes:
            emission.add(
                "DequantizeLinear",
                picked,
                scale,
                *zero,
                output=result,
                **attributes | {"axis": -1},
            )
            return emission
        last = emission.integers("axis", torch.tensor([-1]))
        values = emission.add("Cast", picked, to=TensorProto.FLOAT)
        if zero and any(self.constants[grid[1]].raw_data):
            distance = emission.add(
                "Cast", emission.add("Unsqueeze", *zero, last), to=TensorProto.FLOAT
            )
            values = emission.add("Sub", values, distance)
        emission.add("Mul", values, emission.add("Unsqueeze", scale, last), output=result)
        return emission
