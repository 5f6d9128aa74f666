"""Fast finetuning: layer by layer, weights are rounded so that the quantized network computes
what the float one does.

Changes weights and their scales only, and no output channel so that it ends worse than
round-to-nearest left it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from quantizer.algorithms.gram import DEEPEST
from quantizer.algorithms.patches import channel_rows, matrix_weight, patches, weight_matrix
from quantizer.algorithms.rounding_problem import RoundingProblem, adaquant, adaround
from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.errors import DataError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.parameters import set_parameter
from quantizer.nn.layer import Layer
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.qparams import uncut
from quantizer.numerics.rounding import NEAREST
from quantizer.observers import code_range_of

SOLVERS: dict[str, Callable[[RoundingProblem], tuple[Tensor, Tensor]]] = {
    "adaround": adaround,
    "adaquant": adaquant,
}
"""By the name on the command line: each gives integers [groups, rows, depth] without zero
point, and scales [units].
"""

MOST_BITS = 8  # of weights; with more float32's noise decides, and nothing is to be gained
# Positions of a layer's output to look at, at least and at most; between them 16 * depth
SAMPLES = (1024, 16384)
VALUES = 1 << 26  # of the sampled inputs of one layer


@dataclass(frozen=True)
class FinetunedLayer:
    """What a layer ended with: its rounded weight, its scale, and the squared error of its
    outputs with round-to-nearest and now, over all batches, after a fused activation and the
    output's quantizer.
    """

    weight: Tensor
    scale: Tensor
    before: float
    after: float


def finetunable(node: Node, layer: Layer) -> bool:
    """Whether the layer multiplies with integer weights coarse enough to gain from learned
    rounding.

    Each output channel must have one scale: groups of inputs are not what the solvers are
    about, nor are experts, whose rows come in another order in the float network. Weights that
    are rounded down stay so: a code times its scale may be rounded down to the code below.
    """
    if (
        not node.row.is_linear_or_convolution
        or node.row.experts
        or "weights" not in layer.quantizers
    ):
        return False
    spec = weight_quantizer(layer).spec
    depth = weight_matrix(layer, layer.get_parameter("weight")).shape[2]
    rows = spec.qscheme == "per_tensor" or (
        spec.qscheme == "per_channel" and spec.ch_axis == int(node.row.transposed)
    )
    integer = spec.dtype == "int" and spec.round_mode in NEAREST
    return integer and rows and spec.bit_width <= MOST_BITS and depth <= DEEPEST


def fast_finetune(
    reference: SequentialRunner,
    quantized: SequentialRunner,
    mode: str,
    *,
    seed: int = 0,
    done: Mapping[str, FinetunedLayer] | None = None,
    after_layer: Callable[[Mapping[str, FinetunedLayer]], None] | None = None,
) -> dict[str, FinetunedLayer]:
    """Round the weights of each layer in execution order, on the inputs that rounding those
    before it has left.

    Targets are the float network's outputs for the same samples (asymmetric reconstruction). An
    output channel whose error over all batches is not smaller than with round-to-nearest keeps
    that; channels that share a scale decide together where the scale changes. Weights end
    rounded: quantizing them again gives the same codes.

    Args:
        reference: runs the float network; before its first node.
        quantized: runs the quantized network, of the same graph and on the same batches and
            device; the network has the new weights afterwards.
        mode: a key of `SOLVERS`.
        seed: draws the positions that are looked at, for each layer anew.
        done: what an interrupted call had found already.
        after_layer: called after each node of the graph with what is found so far, for progress
            and checkpoints.

    Returns:
        The result of each layer that `finetunable` accepts, by name.

    Raises:
        DataError: a layer's outputs are not finite; the layer is named.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020,
    section 3.4.
    """
    found = dict(done or {})
    with torch.no_grad():
        for index, node in enumerate(quantized.network.graph.nodes):
            targets = reference.keep(reference.compute(node))
            layer = quantized.network.layers[node.name]
            if finetunable(node, layer):
                if node.name in found:
                    _put(layer, found[node.name].weight, found[node.name].scale)
                else:
                    found[node.name] = _Layer(reference, quantized, node, targets).solve(
                        mode, seed + index
                    )
            reference.release(targets)
            quantized.done(node)
            if after_layer is not None:
                after_layer(found)
    return found


class _Layer:
    """One layer in both networks, with its float outputs."""

    def __init__(
        self,
        reference: SequentialRunner,
        quantized: SequentialRunner,
        node: Node,
        targets: list[Tensor],
    ) -> None:
        self.node, self.targets, self.quantized = node, targets, quantized
        self.layer = quantized.network.layers[node.name]
        self.weight = reference.network.layers[node.name].get_parameter("weight")
        self.quantizer = weight_quantizer(self.layer)
        self.follower = fused_activation(quantized.network.graph, node)
        self.activations = [
            each.network.layers[self.follower.name]
            for each in (reference, quantized)
            if self.follower
        ]

    def solve(self, mode: str, seed: int) -> FinetunedLayer:
        """Solve the layer, and keep of the solution what is better on all batches."""
        shape = self.quantizer.scale.shape
        plain, before = self.layer.get_parameter("weight").detach().clone(), self.errors()
        problem = self.problem(torch.Generator().manual_seed(seed))
        integers, scale = SOLVERS[mode](problem)
        learned = matrix_weight(self.layer, (integers * problem.steps(scale)).to(plain.dtype))
        _put(self.layer, learned, scale.view(shape))
        after = self.errors()
        better = (after < before).view_as(problem.unit)
        if not torch.equal(scale, problem.scale):
            better = (problem.per_unit((after - before).view_as(problem.unit)) < 0)[
                problem.unit
            ]
        used = problem.per_unit(better.float()) > 0
        rows = [weight_matrix(self.layer, weight) for weight in (learned, plain)]
        weight = matrix_weight(self.layer, torch.where(better[..., None], rows[0], rows[1]))
        scale = torch.where(used, scale, problem.scale).view(shape)
        _put(self.layer, weight, scale)
        left = torch.where(better.flatten(), after, before)
        return FinetunedLayer(weight.cpu(), scale.cpu(), float(before.sum()), float(left.sum()))

    def problem(self, draw: torch.Generator) -> RoundingProblem:
        """The layer's least squares, over positions of its outputs drawn from all batches
        alike.
        """
        layer, quantizer = self.layer, self.quantizer
        weight = weight_matrix(layer, self.weight).float()
        scale, zero_point = (
            quantizer.scale.flatten().float(),
            quantizer.zero_point.flatten().float(),
        )
        unit = self.rows_of(torch.arange(scale.numel(), device=scale.device))
        plain = weight_matrix(layer, layer.get_parameter("weight")).float()
        inputs, targets = self.sampled(draw, weight.shape)
        return RoundingProblem(
            weight=weight,
            nearest=(plain / scale[unit][..., None]).round(),
            inputs=inputs,
            targets=targets,
            scale=scale,
            zero_point=zero_point,
            unit=unit,
            quant_min=quantizer.spec.quant_min,
            quant_max=quantizer.spec.quant_max,
            power_of_two=quantizer.spec.scale_type != "float",
            uncut=uncut(code_range_of(quantizer.spec)),
        )

    def sampled(self, draw: torch.Generator, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Quantized inputs [groups, samples, depth] and float outputs without the bias [groups,
        samples, rows].
        """
        positions = sum(len(channel_rows(self.layer, target)) for target in self.targets)
        least, most = SAMPLES
        wanted = min(max(16 * shape[2], least), most, max(256, VALUES // (shape[0] * shape[2])))
        share = wanted / max(1, positions)
        inputs, targets = [], []
        for call, target in zip(self.quantized.calls(self.node), self.targets, strict=True):
            rows = channel_rows(self.layer, target)
            picked = torch.randperm(len(rows), generator=draw)[
                : max(1, round(share * len(rows)))
            ].to(rows.device)
            x = next(iter(call.values()))
            if "input" in self.layer.quantizers:
                x = self.layer.quantizers["input"](x)
            inputs.append(patches(self.layer, x, picked).float())
            targets.append(rows[picked].float())
        bias = self.layer._parameters.get("bias")
        wanted_outputs = torch.cat(targets) - (0 if bias is None else bias.detach().float())
        return torch.cat(inputs, 1), wanted_outputs.reshape(-1, *shape[:2]).transpose(0, 1)

    def rows_of(self, values: Tensor) -> Tensor:
        """Values of the scale's shape by rows of the weight matrix: [groups, rows]."""
        groups, rows, _ = weight_matrix(self.layer, self.layer.get_parameter("weight")).shape
        if self.quantizer.scale.numel() == 1:
            return values.reshape(1, 1).expand(groups, rows)
        return values.reshape(groups, rows)

    def errors(self) -> Tensor:
        """Squared error of each output channel over all batches, float64 [channels]; DataError
        if it is not finite.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)
        for target, output in zip(self.targets, self.quantized.compute(self.node), strict=True):
            values = [target, output]
            if self.follower is not None:
                name = next(iter(self.follower.inputs))
                values = [
                    act(**{name: value.clone()})
                    for act, value in zip(self.activations, values, strict=True)
                ]
            difference = channel_rows(self.layer, values[0] - values[1])
            total = total + difference.double().square().sum(0)
        if not total.isfinite().all():
            raise DataError(
                f"the error of {self.node.name} is not finite: its outputs are infinite, or "
                "NaN",
                help="check the data and the weights, or give its activations more bits",
            )
        return total


def fused_activation(graph: Graph, node: Node) -> Node | None:
    """The activation function that hardware applies to the node's output before anyone else
    reads it.
    """
    readers = graph.consumers[node.name]
    if len(readers) != 1 or not readers[0]:
        return None
    follower = graph.by_name[readers[0]]
    return (
        follower if follower.row.kind == "fusable" and len(list(follower.refs())) == 1 else None
    )


def weight_quantizer(layer: Layer) -> TensorQuantizer:
    """The quantizer of the layer's weight, which must have one."""
    return cast(TensorQuantizer, layer.quantizers["weights"])


def _put(layer: Layer, weight: Tensor, scale: Tensor) -> None:
    """Give a quantized layer a weight that is rounded to this scale."""
    set_parameter(layer, "weight", weight)
    weight_quantizer(layer).scale = scale.to(layer.get_parameter("weight").device)
