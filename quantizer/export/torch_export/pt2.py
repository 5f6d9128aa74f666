"""The .pt2 target: the quantized network as a `torch.export` program with integer weights, and
`quantized_decomposed` operators where activations are quantized. Loads without quantizer.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantizer.calibration.solution import Solution
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.onnx.biases import ROOM, overflowing
from quantizer.export.torch_export.program import exported, saved
from quantizer.export.torch_export.qdq import (
    CARRIERS,
    DEQUANTIZE,
    Activation,
    Carrier,
    Weight,
    has_operators,
    is_channelwise,
)
from quantizer.export.torch_export.verify import verify_program
from quantizer.graph.ir import Graph, Node
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.storage.files import write_bytes


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the program; `torch.export.load(path).module()` is called as the model was, with
    any batch size, and returns dicts, lists and tuples.

    Weights are stored as codes, biases as floats; the stored example call is zeros. What has no
    operator of 8-bit integers is computed by plain ones. The bytes are loaded and run before
    they are written.

    Raises:
        ModelError: torch.export refuses the network.
        VerificationError: the program does not give test mode's outputs.
    """
    graph = deployment.graph.replaced(rebuild=None)
    plain = dataclasses.replace(deployment, graph=graph, solution=deployment.solution.by_rows())
    is_for_executorch = deployment.choice("pt2_activations") == "int8"
    network = plain.network()
    in_float = overflowing(network, plain.encoded, ROOM) if is_for_executorch else set[str]()
    carrier = CARRIERS[deployment.choice("pt2_activations")]
    program = exported(
        _Coded(network, graph, plain.encoded, carrier, in_float), graph, *deployment.blank
    )
    if is_for_executorch:
        _dequantize_for_each(program)
    content = saved(program)
    remedy = "--deploy pt2_float computes with floats, as test mode does"
    verification = verify_program(content, deployment, path.name, remedy)
    write_bytes(path, content)
    return verification


def _dequantize_for_each(program: ExportedProgram) -> None:
    """Give each reader of codes a dequantization of its own: XNNPACK's partitions cannot share
    one.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        for reader in [reader for reader in node.users if reader.op != "output"][1:]:
            with graph.inserting_before(reader):
                own = graph.node_copy(node)
            reader.replace_input_with(node, own)
    program.graph_module.recompile()


class _Coded(nn.Module):
    """The network with codes for weights and operators for quantizers, where there are some.

    The weights of layers `in_float` are decoded by plain operators, so that no kernel of
    integers is taken for them.
    """

    def __init__(
        self,
        network: Network,
        graph: Graph,
        solution: Solution,
        carrier: Carrier,
        in_float: Collection[str],
    ) -> None:
        super().__init__()
        self.network = network
        self.weights: dict[str, Weight] = {}
        for (name, role), tensor in solution.tensors.items():
            layer, node = network.layers[name], graph.by_name[name]
            if base_role(role) == "weights" and tensor.codes is not None:
                parameter = parameter_name(role)
                weight = Weight(
                    tensor, multiplied=_is_multiplied(node) and name not in in_float
                )
                layer.quantizers[role] = weight
                self.weights[f"{network.module_names[name]}.{parameter}"] = weight
                del layer._parameters[parameter]
            elif not is_parameter(role) and has_operators(
                tensor.spec, _dtype(graph, node, role)
            ):
                layer.quantizers[role] = Activation(tensor, carrier)
        for name, tensor in _quantized_before(graph, solution).items():
            network.layers[name].quantizers["input"] = Activation(tensor, carrier)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights: dict[str, Tensor] = {name: weight() for name, weight in self.weights.items()}
        return torch.func.functional_call(self.network, weights, args, kwargs)


def _is_multiplied(node: Node) -> bool:
    """Whether a layer multiplies its input by its weight, with output channels along axis 0."""
    return node.is_multiplying and not node.row.transposed


def _dtype(graph: Graph, node: Node, role: str) -> torch.dtype | None:
    """Of an activation in a role."""
    return (
        node.dtype
        if role == "activation" or node.op == "input"
        else graph.by_name[node.input_roles()[role]].dtype
    )


def _quantized_before(graph: Graph, solution: Solution) -> dict[str, QuantizedTensor]:
    """How the input of layers was quantized, where operators that keep its codes are between.

    Quantized again, its values stay, and kernels of integers find it where they look for it.
    """
    found: dict[str, QuantizedTensor] = {}
    for node in graph.nodes:
        weight = solution.tensors.get((node.name, "weights"))
        if not _is_multiplied(node) or weight is None or not is_channelwise(weight):
            continue
        source = graph.source(node)
        while (
            source is not None
            and source.row.keeps_scale
            and (source.name, "activation") not in solution.tensors
        ):
            source = graph.source(source)
        if (
            source is None
            or source is graph.source(node)
            or (node.name, "input") in solution.tensors
        ):
            continue
        tensor = solution.tensors.get(
            (source.name, "input" if source.op == "input" else "activation")
        )
        if tensor is not None and has_operators(tensor.spec, node.dtype):
            found[node.name] = tensor
    return found
