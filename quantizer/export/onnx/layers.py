"""Compares the codes of all layers in a session with test mode's, each from the same codes."""

from collections.abc import Mapping
from typing import Any

import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper
from torch import Tensor

from quantizer.evaluation.exact import LayerCodes
from quantizer.export.deployment import Deployment
from quantizer.nn.network import Execution
from quantizer.plan.model import Key


class LayerCheck:
    """Runs test mode with every quantized value taken from the session.

    So a difference stays where it arose.

    Attributes:
        model: the file's, with the codes among its outputs.
        values: the names of values that hold codes, of layers' outputs and inputs.
        rows: the comparison of each.
    """

    def __init__(self, model: ModelProto, deployment: Deployment) -> None:
        self.network = deployment.reference
        self.tensors = deployment.solution.tensors
        self.values: dict[Key, str] = {}
        self._zeros: dict[Key, NDArray[Any]] = {}
        self._find_codes(model)
        self.rows = {key: LayerCodes(*key) for key in self.values}
        self.model = ModelProto()
        self.model.CopyFrom(model)
        for key, name in self.values.items():
            data_type = onnx.helper.np_dtype_to_tensor_dtype(self._zeros[key].dtype)
            output = onnx.helper.make_tensor_value_info(name, data_type, None)
            self.model.graph.output.append(output)

    def _find_codes(self, model: ModelProto) -> None:
        """Find the values that hold codes, and the zero points that are stored for them."""
        initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type != "DequantizeLinear" or node.input[0] in initializers:
                continue
            key = self._key_of(node)
            if key is not None:
                self.values[key] = node.input[0]
                self._zeros[key] = numpy_helper.to_array(initializers[node.input[2]])

    def _key_of(self, node: NodeProto) -> Key | None:
        """Return what a node dequantizes; its name is `<layer>.<role>.<number>.<operator>`."""
        stem = node.name.rpartition(".")[0].rpartition(".")[0]
        layer, _, role = stem.rpartition(".")
        tensor = self.tensors.get((layer, role))
        if tensor is None or role not in ("input", "activation"):
            return None
        if tensor.spec.dtype != "int" or tensor.spec.is_dynamic:
            return None
        return layer, role

    @torch.no_grad()
    def add(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        codes: Mapping[str, NDArray[Any]],
    ) -> None:
        """Add one batch; `codes` are outputs of the session by name."""
        graph = self.network.graph
        execution = Execution(self.network, self.network.inputs(args, kwargs))
        while execution.position < len(graph.nodes):
            node = graph.nodes[execution.position]
            input_key = (node.name, "input")
            output_role = "input" if node.op == "input" else "activation"
            output_key = (node.name, output_role)
            values = execution.values
            source = graph.source(node)
            if input_key in self.values and source is not None:
                layer = self.network.layers[node.name]
                quantized = layer.quantize_input(values[source.name])
                seen = self._compared(input_key, quantized, codes)
                values = values | {source.name: seen}
            value = self.network.run_node(node, values)
            if output_key in self.values:
                value = self._compared(output_key, value, codes)
            execution.put(value)

    def _compared(self, key: Key, value: Tensor, codes: Mapping[str, NDArray[Any]]) -> Tensor:
        """Compare a value's codes with the session's, and return the value of the latter."""
        scale = self.tensors[key].scale
        stored = torch.from_numpy(codes[self.values[key]])
        distances = (stored.to(torch.int64) - int(self._zeros[key])).view(value.shape)
        self.rows[key].add(distances, torch.round(value / scale).to(torch.int64))
        return distances * scale
