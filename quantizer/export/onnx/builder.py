"""Adds nodes and initializers to an ONNX graph, and replaces values of it."""

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantizer.export.onnx.lowering import stored_tensor

_OUTPUT_COUNTS = {"DynamicQuantizeLinear": 3}


class NodeBuilder:
    """Adds nodes before or after a node, named after what they belong to."""

    def __init__(self, name: str, anchor: ir.Node, *, after: bool = False) -> None:
        assert anchor.graph is not None
        self.name = name
        self.graph = anchor.graph
        self._anchor = anchor
        self._is_after = after
        self._count = 0

    def add(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        node_name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Add a node and return its first output.

        Args:
            node_name: replaces the node's generated name.
        """
        label = f"{self.name}.{self._count}.{op_type}"
        self._count += 1
        node = ir.node(
            op_type,
            inputs,
            attributes,
            domain=domain,
            num_outputs=_OUTPUT_COUNTS.get(op_type, 1),
            name=node_name or label,
        )
        for index, value in enumerate(node.outputs):
            value.name = label
            if index:
                value.name = f"{label}.{index}"
        if self._is_after:
            self.graph.insert_after(self._anchor, node)
            self._anchor = node
        else:
            self.graph.insert_before(self._anchor, node)
        return node.outputs[0]

    def cast(self, x: ir.Value, data_type: ir.DataType) -> ir.Value:
        """Add a Cast and return its value."""
        return self.add("Cast", x, to=int(data_type))

    def clip(
        self,
        x: ir.Value,
        low: Tensor | float,
        high: Tensor | float,
        data_type: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        """Add a Clip to constant bounds and return its value."""
        bounds = self.constant("low", low, data_type), self.constant("high", high, data_type)
        return self.add("Clip", x, *bounds)

    def requantized(self, x: ir.Value, *qparams: ir.Value | None) -> ir.Value:
        """Add a QuantizeLinear and the DequantizeLinear of its codes, and return the value."""
        codes = self.add("QuantizeLinear", x, *qparams)
        return self.add("DequantizeLinear", codes, *qparams)

    def indices(self, part: str, values: list[int]) -> ir.Value:
        """Add an initializer of int64 and return its value."""
        return self.constant(part, torch.tensor(values), ir.DataType.INT64)

    def constant(
        self, part: str, value: Tensor | float, data_type: ir.DataType = ir.DataType.FLOAT
    ) -> ir.Value:
        """Add an initializer and return its value."""
        name = f"{self.name}.{part}"
        tensor = stored_tensor(name, torch.as_tensor(value), data_type)
        return add_initializer(self.graph, tensor)


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor to the initializers of a graph and return its value."""
    value = ir.val(tensor.name, const_value=tensor)
    graph.register_initializer(value)
    return value


def redirect(old: ir.Value, new: ir.Value) -> None:
    """Redirect all readers of `old` to `new`, which takes over its name, type and shape.

    If `old` is an output of the graph, `new` takes its place.
    """
    new.name = old.name
    new.type = old.type
    new.shape = old.shape
    old.name = f"{old.name}.replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace_node(node: ir.Node, value: ir.Value) -> None:
    """Remove a node with one output; `value` takes the place of the output."""
    redirect(node.outputs[0], value)
    remove_node(node)


def remove_node(node: ir.Node) -> None:
    """Remove a node that nothing reads."""
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def operand(node: ir.Node, index: int = 0) -> ir.Value:
    """Return an input of a node that is not left out."""
    value = node.inputs[index]
    assert value is not None
    return value


def nodes_of(graph: ir.Graph, *op_types: str) -> list[ir.Node]:
    """Return the nodes of these types, in a list: the graph may be changed meanwhile."""
    return [node for node in graph if node.op_type in op_types]


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that makes a value, if it is of this type."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def is_quantized(value: ir.Value) -> bool:
    """Return whether a QuantizeLinear reads a value."""
    return any(
        reader.op_type == "QuantizeLinear" and reader.inputs[0] is value
        for reader in value.consumers()
    )


def array_of(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the content of an initializer; None for any other value."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return np.asarray(value.const_value.numpy())


def is_constant(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer."""
    return value is not None and value.is_initializer()


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return the values of a node's attributes by name."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node without those that are left out."""
    return [value for value in node.inputs if value is not None]


def make_names_unique(graph: ir.Graph) -> None:
    """Number nodes and values with the name of an earlier one, or of an input, an output or an
    initializer: two passes may add to the same layer.
    """
    node_names: set[str] = set()
    value_names = set(graph.initializers)
    for value in (*graph.inputs, *graph.outputs):
        value_names.add(value.name or "")
    for node in graph.all_nodes():
        node.name = _unused(node.name, node_names)
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = _unused(value.name, value_names)


def _unused(name: str | None, taken: set[str]) -> str | None:
    """Return a name that is added to those that are taken, with a number if it is there."""
    if not name:
        return name
    unused = name
    count = 1
    while unused in taken:
        count += 1
        unused = f"{name}.{count}"
    taken.add(unused)
    return unused
