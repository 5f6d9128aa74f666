"""torch.onnx's translation of a network, with a mark where each activation or weight is
quantized.
"""

from typing import Any

import torch
from onnx import ModelProto, helper
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.errors import ModelError
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.onnx.lowering import DOMAIN, Wanted
from quantizer.export.onnx.written_out import decompositions
from quantizer.export.torch_export.program import exported
from quantizer.graph.trace import quiet, without_stack_traces
from quantizer.nn.function import Function
from quantizer.nn.network import Network


class _Mark(nn.Module):
    """Stands where `index` of the quantizations belongs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::Mark",
            (x,),
            {"index": self.index},
            dtype=x.dtype,
            shape=x.shape,
            version=1,
        )


class _Flat(nn.Module):
    """The network with marks for its quantizers, from a flat list of tensors to another.

    Weights are marked where they are used, so that torch.onnx does not fold them into something
    else.
    """

    def __init__(self, network: Network, deployment: Deployment, wanted: Wanted) -> None:
        super().__init__()
        self.network = network
        self.leaves, self.spec = pytree.tree_flatten(deployment.blank)
        for function in network.layers.values():
            if isinstance(function, Function):
                function.leave_ties_open()
        self.weights: dict[str, _Mark] = {}
        for index, ((layer, role), _) in enumerate(wanted):
            if base_role(role) == "weights":
                self.weights[f"{network.module_names[layer]}.{parameter_name(role)}"] = _Mark(
                    index
                )
            elif not is_parameter(role):
                network.layers[layer].attach(role, _Mark(index))  # type: ignore[arg-type]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        weights = {
            name: mark(self.network.get_parameter(name)) for name, mark in self.weights.items()
        }
        outputs: list[Tensor] = []
        for output in tensor_leaves(
            torch.func.functional_call(self.network, weights, args, kwargs)
        ):
            named_twice = any(output is other for other in (*tensors, *outputs))
            outputs.append(output.clone() if named_twice else output)
        return outputs


def translate(
    deployment: Deployment, network: Network, wanted: Wanted, opset: int
) -> ModelProto:
    """The network as ONNX, its inputs and outputs `input_0`, …, `output_0`, … in the order of
    the call's tensors.

    Args:
        network: the deployment's, which marks are attached to.
        wanted: what is quantized, in the order of the marks' indices.

    Raises:
        ModelError: torch.onnx does not know an operator of the network.
    """
    flat = _Flat(network, deployment, wanted)
    tensors = tuple(leaf for leaf in flat.leaves if isinstance(leaf, Tensor))
    program = _translatable(exported(flat, deployment.graph, tensors, {}))
    try:
        with quiet(), torch.no_grad(), without_stack_traces():
            translated = torch.onnx.export(
                program,
                input_names=[f"input_{index}" for index in range(len(tensors))],
                output_names=[f"output_{index}" for index in range(len(deployment.expected))],
                opset_version=opset,
                dynamo=True,
                optimize=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        why = next((line for line in str(error).splitlines() if line.startswith("<class")), "")
        raise ModelError(
            f"--deploy onnx: torch.onnx cannot translate {deployment.graph.model}: "
            f"{why.partition(': ')[2]}",
            help="the pt2 target has no such limit",
        ) from error
    assert translated is not None  # only the old exporter returns nothing
    model: ModelProto = translated.model_proto
    _hand_out_constants(model)
    return model


def _hand_out_constants(model: ModelProto) -> None:
    """An operator for each output that is a constant, as ONNX wants every output to be made."""
    outputs = {value.name for value in model.graph.output}
    for tensor in model.graph.initializer:
        if tensor.name in outputs:
            name, tensor.name = tensor.name, f"{tensor.name}.constant"
            model.graph.node.append(helper.make_node("Identity", [tensor.name], [name]))


def _translatable(program: ExportedProgram) -> ExportedProgram:
    """The program with operators that torch.onnx and the runtimes read right."""
    written_out = decompositions(program)
    if not written_out:
        return program  # as every decomposition takes as long as the export
    with quiet(), without_stack_traces():
        translatable: ExportedProgram = program.run_decompositions(dict(written_out))
    return translatable
