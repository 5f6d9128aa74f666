"""Writes the .pt2 target: a `torch.export` program with integer weights and
`quantized_decomposed` operators.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantizer.calibration.solution import Solution
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.export.deployment import Deployment
from quantizer.export.onnx.biases import MAX_SUM_BIAS, overflowing
from quantizer.export.torch_export.exporter import ProgramExporter
from quantizer.export.torch_export.program import export_program
from quantizer.export.torch_export.qdq import (
    CODE_TYPES,
    DEQUANTIZE,
    Activation,
    CodeType,
    Weight,
    has_operators,
    is_channelwise,
)
from quantizer.graph.ir import Graph, Node
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor


class Pt2Exporter(ProgramExporter):
    """Writes a program with codes for weights and floats for biases.

    What has no operator of 8-bit integers is computed in float.
    """

    remedy = "--deploy pt2_float computes with floats, as test mode does"

    def program(self, deployment: Deployment) -> ExportedProgram:
        """Return the network with codes and operators for its quantizations."""
        graph = deployment.graph.replaced(rebuild=None)
        by_rows = deployment.solution.by_rows()
        rebuilt = dataclasses.replace(deployment, graph=graph, solution=by_rows)
        network = rebuilt.network()
        solution = rebuilt.encoded
        activations = deployment.choice("pt2_activations")
        is_for_executorch = activations == "int8"
        float_layers: set[str] = set()
        if is_for_executorch:
            float_layers = overflowing(network, solution, MAX_SUM_BIAS)
        coded = _CodedNetwork(network, solution, CODE_TYPES[activations], float_layers)
        program = export_program(
            coded,
            graph,
            *deployment.blank,
            names=deployment.parameter_names,
            output_names=deployment.output_names,
        )
        if is_for_executorch:
            _dequantize_for_each(program)
        return program


def _dequantize_for_each(program: ExportedProgram) -> None:
    """Give each reader its own dequantization; XNNPACK's partitions cannot share one."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        readers = [reader for reader in node.users if reader.op != "output"]
        for reader in readers[1:]:
            with graph.inserting_before(reader):
                copy = graph.node_copy(node)
            reader.replace_input_with(node, copy)
    program.graph_module.recompile()


class _CodedNetwork(nn.Module):
    """A network with codes for weights and, where they exist, operators for quantizers.

    The weights of `float_layers` are decoded by float operators, so that no integer kernel
    matches them.
    """

    def __init__(
        self,
        network: Network,
        solution: Solution,
        code_type: CodeType,
        float_layers: Collection[str],
    ) -> None:
        super().__init__()
        graph = network.graph
        self.network = network
        self.weights: dict[str, Weight] = {}
        for (name, role), tensor in solution.tensors.items():
            layer = network.layers[name]
            node = graph.by_name[name]
            if base_role(role) == "weights" and tensor.codes is not None:
                parameter = parameter_name(role)
                is_multiplied = _is_multiplied(node) and name not in float_layers
                weight = Weight(tensor, multiplied=is_multiplied)
                layer.quantizers[role] = weight
                self.weights[f"{network.module_names[name]}.{parameter}"] = weight
                del layer._parameters[parameter]
                continue
            if is_parameter(role):
                continue
            if has_operators(tensor.spec, _activation_dtype(graph, node, role)):
                layer.quantizers[role] = Activation(tensor, code_type)
        for name, tensor in _moved_inputs(graph, solution).items():
            network.layers[name].quantizers["input"] = Activation(tensor, code_type)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights: dict[str, Tensor] = {name: weight() for name, weight in self.weights.items()}
        return torch.func.functional_call(self.network, weights, args, kwargs)


def _is_multiplied(node: Node) -> bool:
    """Return whether a layer multiplies by its weight, with output channels along axis 0."""
    return node.is_multiplying and not node.row.transposed


def _activation_dtype(graph: Graph, node: Node, role: str) -> torch.dtype | None:
    if role == "activation" or node.op == "input":
        return node.dtype
    return graph.by_name[node.input_roles()[role]].dtype


def _moved_inputs(graph: Graph, solution: Solution) -> dict[str, QuantizedTensor]:
    """Return how inputs were quantized that reach their layer through data movement.

    Quantizing them again gives the same codes, and integer kernels find the quantization
    directly before the layer, where they look for it.
    """
    tensors = solution.tensors
    inputs: dict[str, QuantizedTensor] = {}
    for node in graph.nodes:
        weight = tensors.get((node.name, "weights"))
        if not _is_multiplied(node) or weight is None or not is_channelwise(weight):
            continue
        origin = graph.source(node)
        is_moved = False
        while (
            origin is not None
            and origin.row.keeps_scale
            and (origin.name, "activation") not in tensors
        ):
            origin = graph.source(origin)
            is_moved = True
        if origin is None or not is_moved or (node.name, "input") in tensors:
            continue
        role = "input" if origin.op == "input" else "activation"
        tensor = tensors.get((origin.name, role))
        if tensor is not None and has_operators(tensor.spec, node.dtype):
            inputs[node.name] = tensor
    return inputs
