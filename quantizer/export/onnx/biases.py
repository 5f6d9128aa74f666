"""Biases as ONNX Runtime adds them to sums of integers: int32, with input scale times weight
scale as the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.export.onnx.specs import input_key, is_narrow, output_spec
from quantizer.graph.ir import Graph
from quantizer.graph.parameters import placed
from quantizer.nn.network import Network
from quantizer.plan.groups import layout

CPU = torch.device("cpu")
ROOM = 1 << 30
"""The largest bias in units of a channel's sums: as much is left for the sum itself."""
TINY = torch.finfo(torch.float32).tiny
"""Products of scales below it, of inputs that are next to nothing, are no units: they lose
bits, and then are zero.
"""


@dataclass(frozen=True)
class SumBias:
    """A bias in units of a convolution's sums: int64 `codes`, [channels], that int32 holds, and
    the float32 `step`.
    """

    codes: Tensor
    step: Tensor

    @property
    def value(self) -> Tensor:
        """What is added."""
        return self.codes * self.step


def as_run(graph: Graph, solution: Solution) -> Solution:
    """The solution with biases rounded as ONNX Runtime does, by corrections; what is rounded
    already stays.

    A channel with next to no weights has so fine a scale that its bias would not fit int32, and
    then ONNX Runtime adds another one; it gets a coarser scale, as its weights hardly count.
    """
    steps = sum_steps(graph, solution)
    if not steps:
        return solution
    solution = _with_room(solution, steps, placed(quantized_network(graph, solution), CPU))
    steps, network = sum_steps(graph, solution), placed(quantized_network(graph, solution), CPU)
    corrections = dict(solution.corrections)
    for layer, bias in sum_biases(network, steps).items():
        change = bias.value - network.layers[layer].get_parameter("bias").detach()
        corrections[layer] = corrections[layer] + change if layer in corrections else change
    return replace(solution, corrections=corrections)


def _with_room(solution: Solution, steps: Mapping[str, Tensor], network: Network) -> Solution:
    """Coarser scales for the channels whose biases would fill more than half of int32."""
    tensors = dict(solution.tensors)
    for layer, step in steps.items():
        excess = network.layers[layer].get_parameter("bias").detach().abs() / step / ROOM
        weights = tensors[layer, "weights"]
        if step.dim() and bool((excess > 1).any()):
            factor = excess.clamp(min=1)
            codes = weights.codes
            if codes is not None:
                zero, along = (
                    each.view(-1, *[1] * (codes.dim() - 1))
                    for each in (weights.zero_point, factor)
                )
                codes = torch.round((codes - zero) / along).add(zero).to(codes.dtype)
            tensors[layer, "weights"] = replace(
                weights, scale=weights.scale * factor, codes=codes
            )
    return replace(solution, tensors=tensors)


def sum_biases(network: Network, steps: Mapping[str, Tensor]) -> dict[str, SumBias]:
    """The biases that fit int32, by layer; `steps` are the units."""
    found = {}
    for layer, step in steps.items():
        codes = torch.round(
            network.layers[layer].get_parameter("bias").detach().double() / step
        )
        if float(codes.abs().max()) <= 2 * ROOM - 1:
            found[layer] = SumBias(codes.to(torch.int64), step)
    return found


def overflowing(network: Network, solution: Solution, most: int = 2 * ROOM - 1) -> set[str]:
    """The layers whose biases no int32 holds in units of their sums; with 16-bit codes these
    units are fine, and with inputs that are next to nothing.

    ONNX Runtime's optimizer writes the bias of any layer between DequantizeLinear nodes in such
    units, and cuts off what does not fit. So does ExecuTorch's XNNPACK.

    Args:
        most: the largest bias in these units that fits.
    """
    graph, specs, found = network.graph, solution.specs, set[str]()
    for (layer, role), weights in solution.tensors.items():
        bias = (
            dict(network.layers[layer].named_parameters()).get("bias")
            if role == "weights"
            else None
        )
        key = input_key(layer, graph, specs)
        if (
            bias is None
            or key is None
            or specs[key].is_dynamic
            or {weights.spec.dtype, specs[key].dtype} != {"int"}
        ):
            continue
        step = float(weights.scale.min()) * float(solution.tensors[key].scale.min())
        if step < TINY or float(bias.detach().abs().max()) > step * most:
            found.add(layer)
    return found


def sum_steps(graph: Graph, solution: Solution) -> dict[str, Tensor]:
    """The units of the sums of each convolution with a bias that has an integer kernel:
    float32, () or [channels].
    """
    specs, found, where = solution.specs, {}, layout(graph)
    for (layer, role), weights in solution.tensors.items():
        node = graph.by_name[layer]
        has_bias = "bias" in node.params or layer in solution.corrections
        if role != "weights" or not node.row.spatial or node.row.transposed or not has_bias:
            continue
        key, output = input_key(layer, graph, specs), output_spec(layer, graph, specs, where)
        by_output = weights.spec.ch_axis is None or (
            weights.spec.qscheme,
            weights.spec.ch_axis,
        ) == ("per_channel", 0)
        if key is None or output is None or not by_output or node.dtype != torch.float32:
            continue
        integers = all(
            is_narrow(spec) and not spec.is_dynamic
            for spec in (weights.spec, specs[key], output)
        )
        step = weights.scale * solution.tensors[key].scale
        if integers and output.round_mode == "half_even" and float(step.min()) >= TINY:
            found[layer] = step
    return found
