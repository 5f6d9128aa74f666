"""Compares the codes of all layers in a default ONNX Runtime session with test mode's, each
made of the same codes.
"""

from collections.abc import Mapping
from typing import Any

import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from torch import Tensor

from quantizer.evaluation.exact import LayerCodes
from quantizer.export.deployment import Deployment
from quantizer.nn.execution import Execution
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key


class LayerCheck:
    """Test mode, with every value that has codes taken from the session, so that a difference
    stays where it arose.

    `model` is the file's, with the codes among its outputs; `rows` has what was found so far.
    """

    def __init__(self, model: ModelProto, deployment: Deployment) -> None:
        self.network = deployment.network()
        self.tensors: Mapping[Key, QuantizedTensor] = deployment.solution.tensors
        self.values, self.zeros = _codes_of(model, self.tensors)
        self.rows = {key: LayerCodes(*key) for key in self.values}
        self.model = ModelProto()
        self.model.CopyFrom(model)
        for key, name in self.values.items():
            data_type = onnx.helper.np_dtype_to_tensor_dtype(self.zeros[key].dtype)
            self.model.graph.output.append(
                onnx.helper.make_tensor_value_info(name, data_type, None)
            )

    @torch.no_grad()
    def add(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        codes: Mapping[str, NDArray[Any]],
    ) -> None:
        """Take in one batch; `codes` are outputs of the session by name."""
        nodes = self.network.graph.nodes
        execution = Execution(self.network, self.network.inputs(args, kwargs))
        while execution.position < len(nodes):
            node = nodes[execution.position]
            own, made = (
                (node.name, "input"),
                (node.name, "input" if node.op == "input" else "activation"),
            )
            values, source = execution.values, self.network.graph.source(node)
            if own in self.values and source is not None:
                quantized = self.network.layers[node.name].quantize_input(values[source.name])
                values = values | {source.name: self._compared(own, quantized, codes)}
            value = self.network.run_node(node, values)
            execution.put(self._compared(made, value, codes) if made in self.values else value)

    def _compared(self, key: Key, value: Tensor, codes: Mapping[str, NDArray[Any]]) -> Tensor:
        """The value that the session's codes stand for."""
        scale, stored = self.tensors[key].scale, torch.from_numpy(codes[self.values[key]])
        found = (stored.to(torch.int64) - int(self.zeros[key])).view(value.shape)
        self.rows[key].add(found, torch.round(value / scale).to(torch.int64))
        return found * scale


Names = dict[Key, str]
Zeros = dict[Key, NDArray[Any]]


def _codes_of(model: ModelProto, tensors: Mapping[Key, QuantizedTensor]) -> tuple[Names, Zeros]:
    """The values that hold codes of layers' outputs and inputs, and the zero points that are
    stored for them.
    """
    keys = {
        f"{layer}.{role}": (layer, role)
        for layer, role in tensors
        if role in ("input", "activation")
    }
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    values, zeros = {}, {}
    for node in model.graph.node:
        key = keys.get(node.name.rpartition(".")[0].rpartition(".")[0])
        if node.op_type != "DequantizeLinear" or key is None or node.input[0] in initializers:
            continue
        if tensors[key].spec.dtype == "int" and not tensors[key].spec.is_dynamic:
            values[key] = node.input[0]
            zeros[key] = numpy_helper.to_array(initializers[node.input[2]])
    return values, zeros
