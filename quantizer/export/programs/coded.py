"""Writes a network as a `torch.export` program with codes for weights and operators of
`quantized_decomposed` for activations, which torch's compiler and ExecuTorch know.

These operators hold integers of 8 bits. Compilers replace them with kernels that ignore the
bounds of codes, the zero point of weights and the axis of their scales. So the operators are
used only where these are the kernels' own. Elsewhere float operators compute the same values.

Some kernels find the range of their input by themselves; activations are widened for them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.functional import conv2d, linear, pad

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.export.arithmetic import input_key, is_narrow
from quantizer.export.deployment import Deployment
from quantizer.export.programs.program import export_program
from quantizer.graph.ir import Graph, Node
from quantizer.nn.function import leave_ties_open
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.codes import decode

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
QUANTIZE_WEIGHT = torch.ops.quantized_decomposed.quantize_per_channel.default
DEQUANTIZE_WEIGHT = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True)
class CodeType:
    """The integer type of an activation's codes, with its ends."""

    dtype: torch.dtype
    low: int
    high: int

    def offset(self, spec: QuantizationSpec) -> int:
        """Return what is added to codes so that this type holds them.

        >>> CODE_TYPES["uint8"].offset(QuantizationSpec())
        128
        >>> CODE_TYPES["int8"].offset(QuantizationSpec())
        0
        """
        if spec.quant_min < self.low:
            return self.low - CODE_TYPES["int8"].low
        if spec.quant_max > self.high:
            return self.high - CODE_TYPES["uint8"].high
        return 0


# torch's compiler has fast kernels for uint8, ExecuTorch's XNNPACK for int8.
CODE_TYPES = {"uint8": CodeType(torch.uint8, 0, 255), "int8": CodeType(torch.int8, -128, 127)}


class Activation(nn.Module):
    """Quantizes and dequantizes an activation that `has_operators`.

    Values are clamped to the bounds of the codes before rounding, which gives the same codes.
    Rounding modes other than half_even are applied by float operators first, so that the
    quantize operator meets no half-way point.
    """

    def __init__(self, tensor: QuantizedTensor, code_type: CodeType) -> None:
        super().__init__()
        spec = tensor.spec
        offset = code_type.offset(spec)
        self.scale = float(tensor.scale)
        self.zero_point = int(tensor.zero_point) + offset
        self.codes = code_type.low, code_type.high, code_type.dtype
        self.bounds: tuple[float, float] | None = None
        self.rounding: TensorQuantizer | None = None
        code_bounds = spec.quant_min + offset, spec.quant_max + offset
        if spec.round_mode != "half_even":
            self.rounding = TensorQuantizer.of(tensor)
        elif code_bounds != (code_type.low, code_type.high):
            ends = torch.tensor([spec.quant_min, spec.quant_max])
            low, high = (ends - tensor.zero_point) * tensor.scale
            self.bounds = float(low), float(high)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the codes of `x`."""
        if self.rounding is not None:
            x = self.rounding(x)
        elif self.bounds is not None:
            x = x.clamp(*self.bounds)
        codes = QUANTIZE(x, self.scale, self.zero_point, *self.codes)
        y: Tensor = DEQUANTIZE(codes, self.scale, self.zero_point, *self.codes)
        return y if x.dtype == y.dtype else y.to(x.dtype)


def has_operators(spec: QuantizationSpec, dtype: torch.dtype | None) -> bool:
    """Return whether an activation is integers of at most 8 bits with one static scale."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return is_narrow(spec) and spec.qscheme == "per_tensor" and not spec.is_dynamic


class Weight(nn.Module):
    """A parameter stored as codes; calling it returns their values.

    Args:
        tensor: with codes.
        axis: that of the output channels; None if no kernel multiplies by the weight.
        codes_range: the smallest and the largest code that the operator states; those of the
            spec if None.
        requantizes: whether an operator quantizes the values, which are a constant in float.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        tensor: QuantizedTensor,
        *,
        axis: int | None,
        codes_range: tuple[int, int] | None = None,
        requantizes: bool = False,
    ) -> None:
        super().__init__()
        assert tensor.codes is not None
        codes, scale, zero_point = tensor.codes, tensor.scale, tensor.zero_point
        self.spec = tensor.spec
        self.requantizes = requantizes
        if codes_range is None:
            codes_range = tensor.spec.quant_min, tensor.spec.quant_max
        self.codes_range = codes_range
        self.dtype = tensor.dtype
        self.axis = axis
        if axis is not None and not is_channelwise(tensor, axis):
            self.axis = None
        if self.axis is not None:
            outputs = codes.shape[self.axis]
            scale = scale.expand(outputs)
            zero_point = torch.zeros(outputs, dtype=torch.int8)
            codes = codes.to(torch.int8)
            if requantizes:
                shape = [1] * codes.dim()
                shape[self.axis] = outputs
                codes = codes * scale.view(shape)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("zero_point", zero_point)

    def widen(self) -> None:
        """Add zeros for two more inputs."""
        # `pad` takes the sizes before and after each axis, from the last axis on.
        sizes = [0] * 2 * (self.codes.dim() - 2)
        self.codes = pad(self.codes, [*sizes, 0, 2])

    def forward(self) -> Tensor:
        """Return the values of the codes."""
        spec = self.spec
        if self.axis is None:
            return decode(self.codes, spec, self.scale, self.zero_point, dtype=self.dtype)
        bounds = *self.codes_range, torch.int8
        codes = self.codes
        operands = self.scale, self.zero_point, self.axis
        if self.requantizes:
            codes = QUANTIZE_WEIGHT(codes, *operands, *bounds)
        values: Tensor = DEQUANTIZE_WEIGHT(codes, *operands, *bounds)
        return values


def is_channelwise(tensor: QuantizedTensor, axis: int) -> bool:
    """Return whether kernels can multiply a weight as it is.

    That is int8 without a zero point, with one scale, or one for each index of the axis.
    """
    spec = tensor.spec
    if spec.dtype != "int" or tensor.dtype != torch.float32:
        return False
    if spec.quant_min < -128 or spec.quant_max > 127 or tensor.zero_point.any():
        return False
    by_output = spec.qscheme == "per_channel" and spec.ch_axis == axis
    return by_output or spec.qscheme == "per_tensor"


_OPERATORS = torch.ops.quantized_decomposed
_IMAGE_DIMENSIONS = 4
_EPS = 1e-12
"""A smaller step than any between codes."""


class WideActivation(Activation):
    """Quantizes an activation, and adds two channels with the least and the greatest value.

    Kernels that give floats round each row or image with its own range. With these channels,
    the range is that of the codes, so that rounding changes nothing.

    Args:
        channels: how many the activation has.
        axes: how many axes images have; 0 or None for rows.
    """

    zeros: Tensor
    ends: Tensor

    def __init__(
        self, tensor: QuantizedTensor, code_type: CodeType, channels: int, axes: int | None
    ) -> None:
        super().__init__(tensor, code_type)
        self.is_image = bool(axes)
        kernel = [1] * (axes or 0)
        zeros = torch.zeros(2, channels, *kernel)
        codes = torch.tensor([code_type.low, code_type.high])
        ends = (codes - self.zero_point) * self.scale
        self.register_buffer("zeros", zeros)
        self.register_buffer("ends", ends)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the codes of `x`, and the two channels."""
        y = super().forward(x)
        if self.is_image:
            return self._wide_image(y)
        return self._wide_rows(y)

    # A layer makes the two channels, because XNNPACK takes no slices of batches whose size is
    # open.

    def _wide_image(self, y: Tensor) -> Tensor:
        """Return an image with the two channels, rounded with one range for all of it."""
        ends = conv2d(y, self.zeros, self.ends)
        wide = torch.cat([y, ends], 1)
        low, high, dtype = self.codes
        qparams = _OPERATORS.choose_qparams.tensor(wide, low, high, _EPS, dtype)
        operands = (*qparams, *self.codes)
        codes = _OPERATORS.quantize_per_tensor.tensor(wide, *operands)
        values: Tensor = _OPERATORS.dequantize_per_tensor.tensor(codes, *operands)
        return values

    def _wide_rows(self, y: Tensor) -> Tensor:
        """Return rows with the two channels, rounded with a range for each of them."""
        if y.dim() == _IMAGE_DIMENSIONS:
            # The layout of images would be changed between this quantization and the layer
            y = y.unsqueeze(0)
            y = y.squeeze(0)
        ends = linear(y, self.zeros, self.ends)
        wide = torch.cat([y, ends], -1)
        qparams = _OPERATORS.choose_qparams_per_token_asymmetric(wide, self.codes[2])
        operands = (*qparams, *self.codes)
        codes = _OPERATORS.quantize_per_token(wide, *operands)
        values: Tensor = _OPERATORS.dequantize_per_token(codes, *operands, wide.dtype)
        return values


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
    if form.activations == "int8":
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
    """Give each reader its own dequantization, the output too, in programs of int8.

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
