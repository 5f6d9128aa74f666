"""Writes a network as a `torch.export` program with codes for weights and operators of
`quantized_decomposed` for activations.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantizer.calibration.solution import Solution
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.export.arithmetic import input_key
from quantizer.export.deployment import Deployment
from quantizer.export.programs.program import export_program
from quantizer.export.programs.qdq import (
    CODE_TYPES,
    DEQUANTIZE,
    Activation,
    Weight,
    WideActivation,
    has_operators,
    is_channelwise,
)
from quantizer.graph.ir import Graph, Node
from quantizer.nn.function import leave_ties_open
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor

_HARDTANH = torch.ops.aten.hardtanh.default
_RELU6 = (torch.ops.aten.relu6.default, torch.ops.aten.relu6_.default)


@dataclass(frozen=True)
class ProgramForm:
    """The form in which a compiler takes codes.

    Attributes:
        activations: the integer type of activations, a key of `CODE_TYPES`.
        decoded: the layers whose weights float operators decode from codes, so that no integer
            kernel matches them.
        constant: the layers whose weights are constants in float.
        is_shared: whether all readers of a value share its dequantization.
        weight_codes: the least and greatest code that the operators of weights state; those of
            the spec if None.
        requantizes: whether weights are constants in float that an operator quantizes.
        has_transposed: whether kernels multiply by the codes of transposed convolutions.
        has_ranges: whether kernels that give floats find the range of their inputs.
        widened: the layers with such kernels.
        has_stable_sort: whether there is an operator that keeps the order of equal values.
        most_samples: the largest batch; None if there is no limit.
    """

    activations: str
    decoded: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()
    is_shared: bool = True
    weight_codes: tuple[int, int] | None = None
    requantizes: bool = False
    has_transposed: bool = False
    has_ranges: bool = False
    widened: frozenset[str] = frozenset()
    has_stable_sort: bool = True
    most_samples: int | None = None


def coded_program(
    deployment: Deployment, solution: Solution, form: ProgramForm
) -> ExportedProgram:
    """Return the network of a deployment with codes and operators for its quantizations.

    Args:
        solution: what is written instead of the deployment's solution, with the same codes.

    Raises:
        ModelError: torch.export refuses the network.
    """
    graph = deployment.graph.replaced(rebuild=None)
    stated = dataclasses.replace(deployment, graph=graph, solution=solution)
    network = stated.network()
    if not form.has_stable_sort:
        leave_ties_open(network.layers.values())
    coded = _CodedNetwork(network, stated.encoded, form)
    program = export_program(
        coded,
        graph,
        stated.blank_call(form.most_samples),
        names=deployment.parameter_names,
        output_names=deployment.output_names,
        most_samples=form.most_samples,
    )
    _state_floats(program)
    if not form.is_shared:
        _dequantize_for_each(program)
    return program


def _state_floats(program: ExportedProgram) -> None:
    """Write each ReLU6 as a Hardtanh with floats; torch would write integers.

    Core ML's converter refuses these.
    """
    for target in _RELU6:
        for node in program.graph.find_nodes(op="call_function", target=target):
            node.target = _HARDTANH
            node.args = (node.args[0], 0.0, 6.0)
    program.graph_module.recompile()


def _dequantize_for_each(program: ExportedProgram) -> None:
    """Give each reader its own dequantization, the output too.

    XNNPACK's partitions cannot share one, and LiteRT's converter loses the layout of a shared
    one.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        for reader in list(node.users)[1:]:
            with graph.inserting_before(reader):
                copy = graph.node_copy(node)
            reader.replace_input_with(node, copy)
    program.graph_module.recompile()


class _CodedNetwork(nn.Module):
    """A network with codes for weights and, where they exist, operators for quantizers."""

    def __init__(self, network: Network, solution: Solution, form: ProgramForm) -> None:
        super().__init__()
        graph = network.graph
        code_type = CODE_TYPES[form.activations]
        self.network = network
        self.weights: dict[str, Weight] = {}
        for (name, role), tensor in solution.tensors.items():
            layer = network.layers[name]
            node = graph.by_name[name]
            if name in form.constant and is_parameter(role):
                continue
            if base_role(role) == "weights" and tensor.codes is not None:
                parameter = parameter_name(role)
                axis = _output_axis(node, form)
                if name in form.decoded:
                    axis = None
                weight = Weight(
                    tensor,
                    axis=axis,
                    codes_range=form.weight_codes,
                    requantizes=form.requantizes,
                )
                if name in form.widened:
                    weight.widen()
                layer.quantizers[role] = weight
                self.weights[f"{network.module_names[name]}.{parameter}"] = weight
                del layer._parameters[parameter]
                continue
            if is_parameter(role):
                continue
            if has_operators(tensor.spec, _activation_dtype(graph, node, role)):
                layer.quantizers[role] = Activation(tensor, code_type)
        for name, tensor in _moved_inputs(graph, solution, form).items():
            network.layers[name].quantizers["input"] = Activation(tensor, code_type)
        for name in form.widened:
            node = graph.by_name[name]
            key = input_key(name, graph, solution.specs)
            assert key is not None
            channels = graph.weight(node).shape[1]
            axes = node.row.spatial
            wide = WideActivation(solution.tensors[key], code_type, channels, axes)
            network.layers[name].quantizers["input"] = wide

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network with weights that are decoded from their codes."""
        weights: dict[str, Tensor] = {name: weight() for name, weight in self.weights.items()}
        return torch.func.functional_call(self.network, weights, args, kwargs)


def _output_axis(node: Node, form: ProgramForm) -> int | None:
    """Return the axis of a weight's outputs if kernels multiply by its codes, else None."""
    if not node.is_multiplying:
        return None
    if node.row.transposed and not form.has_transposed:
        return None
    return int(node.row.transposed)


def _activation_dtype(graph: Graph, node: Node, role: str) -> torch.dtype | None:
    """Return the dtype of the value that a node's quantizer of this role takes."""
    if role == "activation" or node.op == "input":
        return node.dtype
    return graph.by_name[node.input_roles()[role]].dtype


def _moved_inputs(
    graph: Graph, solution: Solution, form: ProgramForm
) -> dict[str, QuantizedTensor]:
    """Return the quantization of inputs that a layer does not read directly, by the layer.

    Between their quantization and the layer, data is moved, or values that one layer made are
    joined. Quantizing them again gives the same codes. Integer kernels look for the
    quantization directly before the layer, and find it there.
    """
    inputs: dict[str, QuantizedTensor] = {}
    for node in graph.nodes:
        weight = solution.tensors.get((node.name, "weights"))
        axis = _output_axis(node, form)
        if axis is None or weight is None or not is_channelwise(weight, axis):
            continue
        key = input_key(node.name, graph, solution.specs)
        source = graph.source(node)
        if key is None or source is None:
            continue
        quantized, _ = key
        if quantized in (node.name, source.name):
            continue
        tensor = solution.tensors[key]
        if has_operators(tensor.spec, node.dtype):
            inputs[node.name] = tensor
    return inputs
