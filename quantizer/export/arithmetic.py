"""Finds how the operands and results of a layer are quantized, for engines that compute with
integers, and rounds biases as they add them to sums of integers.

Biases are int32, in steps of the input's scale times the weight's scale.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import maker
from quantizer.graph.ir import Graph, Node
from quantizer.graph.tracing.parameters import move_module
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.groups import layout
from quantizer.plan.layout import PART_SCALE, Join, Layout
from quantizer.plan.model import Key, TensorSpecs
from quantizer.plan.readers import values_readers
from quantizer.storage.deferred_tensor import loaded


def input_key(layer: str, graph: Graph, specs: TensorSpecs) -> Key | None:
    """Return where a layer's input is quantized: by the layer itself, or where it was made."""
    keys = ((layer, "input"), *_source_keys(layer, graph))
    return next((key for key in keys if key in specs), None)


def layer_input_spec(layer: str, graph: Graph, specs: TensorSpecs) -> QuantizationSpec | None:
    """Return how a layer's input is quantized."""
    key = input_key(layer, graph, specs)
    return None if key is None else specs[key]


def output_spec(
    layer: str, graph: Graph, specs: TensorSpecs, where: Layout
) -> QuantizationSpec | None:
    """Return how a layer's output is quantized: where `where` has it, or alike by all readers.

    Args:
        where: the graph's layout.
    """
    for name in _quantization_points(layer, where):
        if (name, "activation") in specs:
            return specs[name, "activation"]
        readers = values_readers(graph, name, where.floats)
        reader_specs = {specs.get((reader, "input")) for reader, _ in readers}
        if len(reader_specs) == 1:
            spec = reader_specs.pop()
            if spec is not None:
                return spec
    return None


def is_narrow(spec: QuantizationSpec | None) -> bool:
    """Return whether a spec is of integers that kernels multiply: 8 bits or fewer."""
    return spec is not None and spec.dtype == "int" and spec.bit_width <= 8


def is_multiplied(node: Node) -> bool:
    """Return whether the role "weights" of a layer is the weight of one product."""
    return node.row.kind == "mac"


def quantized_apart(graph: Graph, solution: Solution, *, any_rounding: bool) -> Solution:
    """Return the solution with values that only a join reads quantized before it, too.

    The codes are the same, and integer kernels can make them. A rounding that takes operators
    in float would cost more than that brings, so only `any_rounding` includes it.
    """
    tensors = dict(solution.tensors)
    where = layout(graph)
    for join in where.joins.values():
        whole = solution.tensors.get((join.group.point, "activation"))
        if whole is None or not is_narrow(whole.spec) or whole.spec.is_dynamic:
            continue
        is_fast_rounding = any_rounding or whole.spec.round_mode == "half_even"
        if not is_fast_rounding or not _keeps_codes(graph, join):
            continue
        factors = _part_factors(graph, where, join)
        for part in join.alone:
            members = [name for name in part.members if name in factors]
            if members:
                alike = replace(whole, scale=whole.scale / factors[members[0]])
                tensors.setdefault((part.point, "activation"), alike)
    return replace(solution, tensors=tensors)


def _keeps_codes(graph: Graph, join: Join) -> bool:
    """Return whether rounding before a join's activation function gives the same codes."""
    for name in join.group.members:
        node = graph.by_name[name]
        is_exact = node.row.keeps_scale or node.row.cuts or node.op == PART_SCALE
        if name != join.name and not is_exact:
            return False
    return True


def _part_factors(graph: Graph, where: Layout, join: Join) -> dict[str, float]:
    """Return the factors of a join's parts before quantization, by the layer that made them."""
    scaling = graph.by_name[join.group.point]
    factors: dict[str, float] = {}
    if scaling.op != PART_SCALE:
        for part in join.alone:
            factors |= dict.fromkeys(part.members, 1.0)
        return factors
    (value,) = scaling.refs()
    if value not in where.origins:
        return {}
    factor_by_channel = loaded(graph.weight(scaling)).tolist()
    first = 0
    for source, length in where.origins[value].parts:
        factors[source] = factor_by_channel[first]
        first += length
    return factors


def _source_keys(layer: str, graph: Graph) -> Iterator[Key]:
    """Yield the outputs of a layer's source, and of those that only hand its value on or join
    parts of it.
    """
    node: Node | None = graph.source(graph.by_name[layer])
    while node is not None:
        role = "input" if node.op == "input" else "activation"
        yield node.name, role
        if node.is_join:
            makers = {maker(graph, name) for name in node.joined()}
            node = graph.by_name[makers.pop()] if len(makers) == 1 else None
        elif node.row.keeps_scale:
            node = graph.source(node)
        else:
            node = None


def _quantization_points(layer: str, where: Layout) -> Iterator[str]:
    """Yield the layers at which a layer's output may be quantized.

    That is with what follows it, or once joined.
    """
    point: str | None = layer
    while point is not None:
        yield point
        point = where.served.get(point)
    for join in where.joins.values():
        if any(layer in part.members for part in join.alone):
            yield join.group.point


_ON_CPU = torch.device("cpu")
MAX_SUM_BIAS = 1 << 30
"""The largest bias in steps of a channel's sums. As much is left for the sum itself."""
# Below it, products of scales lose bits, and then become zero. They belong to inputs that are
# next to nothing.
_TINY = torch.finfo(torch.float32).tiny


class BiasForm(Enum):
    """How a file holds biases.

    KERNELS: int32 beside the convolutions that ONNX Runtime computes in integers, else floats.
    FLOAT: floats only.
    INTEGERS: as KERNELS, and beside linear layers, too, as on phones.
    PRODUCTS: int32 beside every quantized weight, at the input's scale times the weight's.
    """

    KERNELS = "kernels"
    FLOAT = "float"
    INTEGERS = "integers"
    PRODUCTS = "products"


@dataclass(frozen=True)
class SumBias:
    """A bias in steps of a convolution's sums.

    Attributes:
        codes: int64, [channels], in the range of int32.
        step: float32.
    """

    codes: Tensor
    step: Tensor

    @property
    def value(self) -> Tensor:
        """Return what is added."""
        return self.codes * self.step


def with_runtime_biases(
    graph: Graph, solution: Solution, form: BiasForm = BiasForm.KERNELS
) -> Solution:
    """Return the solution with corrections that round biases as the file's engine does.

    A channel with next to no weights has so fine a scale that its bias would not fit int32, and
    then ONNX Runtime adds another one. It gets a coarser scale, as its weights hardly count.
    """
    steps = sum_steps(graph, solution, form)
    if not steps:
        return solution
    network = move_module(quantized_network(graph, solution), _ON_CPU)
    coarser = _coarser_weights(solution, steps, network)
    if coarser:
        solution = replace(solution, tensors={**solution.tensors, **coarser})
        steps = sum_steps(graph, solution, form)
        network = move_module(quantized_network(graph, solution), _ON_CPU)
    corrections = dict(solution.corrections)
    for layer, bias in sum_biases(network, steps).items():
        change = bias.value - _bias_of(network, layer)
        if layer in corrections:
            change = corrections[layer] + change
        corrections[layer] = change
    return replace(solution, corrections=corrections)


def _bias_of(network: Network, layer: str) -> Tensor:
    return network.layers[layer].get_parameter("bias").detach()


def _coarser_weights(
    solution: Solution, steps: Mapping[str, Tensor], network: Network
) -> dict[Key, QuantizedTensor]:
    """Return the weights with channels whose biases would fill more than half of int32, with
    coarser scales for these channels.
    """
    coarser: dict[Key, QuantizedTensor] = {}
    for layer, step in steps.items():
        excess = _bias_of(network, layer).abs() / step / MAX_SUM_BIAS
        if step.dim() and bool((excess > 1).any()):
            factor = excess.clamp(min=1)
            weights = solution.tensors[layer, "weights"]
            if weights.spec.scale_type == "poweroftwo":
                factor = factor.log2().ceil().exp2()
            axis = int(network.graph.by_name[layer].row.transposed)
            coarser[layer, "weights"] = _coarser(weights, factor, axis)
    return coarser


def _coarser(weights: QuantizedTensor, factor: Tensor, axis: int) -> QuantizedTensor:
    """Return weights with the scale of each index of an axis multiplied by a factor."""
    codes = weights.codes
    if codes is not None:
        shape = [1] * codes.dim()
        shape[axis] = -1
        zero_point = weights.zero_point.view(shape)
        distances = (codes - zero_point) / factor.view(shape)
        codes = torch.round(distances).add(zero_point).to(codes.dtype)
    return replace(weights, scale=weights.scale * factor, codes=codes)


def sum_biases(network: Network, steps: Mapping[str, Tensor]) -> dict[str, SumBias]:
    """Return the biases that fit int32, by layer."""
    biases: dict[str, SumBias] = {}
    for layer, step in steps.items():
        codes = torch.round(_bias_of(network, layer).double() / step)
        if float(codes.abs().max()) <= 2 * MAX_SUM_BIAS - 1:
            biases[layer] = SumBias(codes.to(torch.int64), step)
    return biases


def overflowing(
    network: Network, solution: Solution, largest: int = 2 * MAX_SUM_BIAS - 1
) -> set[str]:
    """Return the layers whose biases no int32 holds in steps of their sums.

    With 16-bit codes these steps are fine, and with inputs that are next to nothing. ONNX
    Runtime's optimizer and ExecuTorch's XNNPACK write the bias of any layer between
    DequantizeLinear nodes in such steps, and cut off what does not fit.

    Args:
        largest: the largest bias in these steps that fits.
    """
    specs = solution.specs
    layers: set[str] = set()
    for (layer, role), weights in solution.tensors.items():
        parameters = dict(network.layers[layer].named_parameters())
        key = input_key(layer, network.graph, specs)
        if role != "weights" or "bias" not in parameters or key is None:
            continue
        if weights.spec.dtype != "int" or specs[key].dtype != "int" or specs[key].is_dynamic:
            continue
        step = float(weights.scale.min()) * float(solution.tensors[key].scale.min())
        bias = parameters["bias"].detach()
        if step < _TINY or float(bias.abs().max()) > step * largest:
            layers.add(layer)
    return layers


def sum_steps(
    graph: Graph, solution: Solution, form: BiasForm = BiasForm.KERNELS
) -> dict[str, Tensor]:
    """Return the steps of the sums of each layer with a bias in such steps.

    They are float32, () or [channels].
    """
    if form is BiasForm.FLOAT:
        return {}
    specs = solution.specs
    where = layout(graph)
    steps: dict[str, Tensor] = {}
    for (layer, role), weights in solution.tensors.items():
        node = graph.by_name[layer]
        key = input_key(layer, graph, specs)
        has_bias = "bias" in node.params or layer in solution.corrections
        if role != "weights" or key is None or not has_bias:
            continue
        if form is BiasForm.PRODUCTS:
            has_sums = is_narrow(weights.spec) and is_multiplied(node)
        else:
            output = output_spec(layer, graph, specs, where)
            has_kernel = _has_bias_kernel(node, weights, (specs[key], output))
            is_for_onnx = bool(node.row.spatial) and not node.row.transposed
            has_sums = has_kernel and (is_for_onnx or form is BiasForm.INTEGERS)
        if not has_sums or specs[key].is_dynamic:
            continue
        step = weights.scale * solution.tensors[key].scale
        if float(step.min()) >= _TINY:
            steps[layer] = step
    return steps


def _has_bias_kernel(
    node: Node,
    weights: QuantizedTensor,
    activations: tuple[QuantizationSpec, QuantizationSpec | None],
) -> bool:
    """Return whether integer kernels run a layer, with a bias in steps of its sums.

    Args:
        activations: how its input and its output are quantized.
    """
    if not node.is_multiplying or node.dtype != torch.float32:
        return False
    _, output = activations
    if output is None or output.round_mode != "half_even":
        return False
    for involved in (weights.spec, *activations):
        if involved is None or involved.is_dynamic or not is_narrow(involved):
            return False
    spec = weights.spec
    by_output = spec.qscheme == "per_channel" and spec.ch_axis == int(node.row.transposed)
    return by_output or spec.ch_axis is None
