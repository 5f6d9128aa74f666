"""Fast finetuning: round the weights of each layer so that the quantized network computes what
the float network does.

Changes weights and their scales only. No output channel ends worse than with round-to-nearest
(RTN).

Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization" (arXiv
2004.10568), section 3.4.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from quantizer.algorithms.finetuning.rounding_problem import RoundingProblem, adaquant, adaround
from quantizer.errors import DataError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.layerwise.adjustment import RoundedWeight
from quantizer.layerwise.gram import DEEPEST
from quantizer.layerwise.patches import (
    channel_rows,
    matrix_shape,
    matrix_weight,
    patches,
    weight_matrix,
)
from quantizer.layerwise.sequential_runner import SequentialRunner
from quantizer.nn.layer import Layer
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.qparams import QParams, uncut
from quantizer.numerics.rounding import NEAREST
from quantizer.observers import code_range_of

SOLVERS: dict[str, Callable[[RoundingProblem], tuple[Tensor, Tensor]]] = {
    "adaround": adaround,
    "adaquant": adaquant,
}
"""By the name on the command line. Each returns integers [groups, rows, depth] without zero
point, and scales [units].
"""
# With more bits float32's noise decides, and nothing is gained
_MAX_WEIGHT_BITS = 8
# Positions of a layer's output that are sampled; between the two, 16 * depth
_MIN_SAMPLES = 1024
_MAX_SAMPLES = 16384
# Values of the sampled inputs of one layer
_MAX_SAMPLED_VALUES = 1 << 26


def finetunable(node: Node, layer: Layer) -> bool:
    """Check whether the layer has integer weights coarse enough to gain from learned rounding.

    Each output channel must have one scale, as the solvers do not know groups of inputs.
    Experts are left out, as their rows come in another order in the float network. So are
    weights that are rounded down, as a code times its scale may be rounded down to the code
    below, and weights with negative scales, which the solvers do not search.
    """
    if not node.row.is_linear_or_convolution or node.row.experts:
        return False
    if "weights" not in layer.quantizers:
        return False
    spec = _weight_quantizer(layer).spec
    has_row_scales = spec.qscheme == "per_tensor" or (
        spec.qscheme == "per_channel" and spec.ch_axis == int(node.row.transposed)
    )
    is_integer = spec.dtype == "int" and spec.round_mode in NEAREST
    is_small = spec.bit_width <= _MAX_WEIGHT_BITS and matrix_shape(layer)[2] <= DEEPEST
    return is_integer and has_row_scales and is_small and not spec.has_signed_scale


def fast_finetune(
    reference: SequentialRunner,
    quantized: SequentialRunner,
    mode: str,
    *,
    seed: int,
    done: Mapping[str, RoundedWeight],
    after_layer: Callable[[Mapping[str, RoundedWeight]], None],
) -> dict[str, RoundedWeight]:
    """Round the weights of each layer in execution order, on the inputs that rounding the
    layers before it has left.

    Targets are the float network's outputs for the same samples (asymmetric reconstruction). An
    output channel whose error over all batches is not smaller than with RTN stays at RTN.
    Channels that share a scale decide together where the scale changes. Quantizing the weights
    again gives the same codes.

    Args:
        reference: runs the float network; before its first node.
        quantized: runs the quantized network, of the same graph and on the same batches and
            device. The network has the new weights afterwards.
        mode: a key of `SOLVERS`.
        seed: draws the positions that are sampled, for each layer anew.
        done: what an interrupted call had found already.
        after_layer: called after each node of the graph with the results so far, for progress
            and checkpoints.

    Returns:
        The rounded weight of each layer that `finetunable` accepts, by name. Its errors are
        sums over all batches, after a fused activation and the output's quantizer, and no
        shares.

    Raises:
        DataError: a layer's outputs are not finite; the layer is named.
    """
    results = dict(done)
    with torch.no_grad():
        for index, node in enumerate(quantized.network.graph.nodes):
            targets = reference.store(reference.compute(node))
            layer = quantized.network.layers[node.name]
            if finetunable(node, layer):
                if node.name in results:
                    result = results[node.name]
                    _set_weight(layer, result.weight, result.qparams.scale)
                else:
                    finetuning = _LayerFinetuning(reference, quantized, node, targets)
                    results[node.name] = finetuning.solve(mode, seed + index)
            reference.release(targets)
            quantized.finish(node)
            after_layer(results)
    return results


class _LayerFinetuning:
    """Finetunes one layer, given its float outputs."""

    def __init__(
        self,
        reference: SequentialRunner,
        quantized: SequentialRunner,
        node: Node,
        targets: list[Tensor],
    ) -> None:
        self.node = node
        self.targets = targets
        self.quantized = quantized
        self.layer = quantized.network.layers[node.name]
        self.weight = reference.network.layers[node.name].get_parameter("weight")
        self.quantizer = _weight_quantizer(self.layer)
        self.activation = _fused_activation(quantized.network.graph, node)
        self.networks = (reference.network, quantized.network)

    def solve(self, mode: str, seed: int) -> RoundedWeight:
        """Solve the layer, and take of the solution what is better on all batches."""
        shape = self.quantizer.scale.shape
        rtn = self.layer.get_parameter("weight").detach().clone()
        before = self.errors()
        problem = self.problem(torch.Generator().manual_seed(seed))
        integers, scale = SOLVERS[mode](problem)
        values = (integers * problem.steps(scale)).to(rtn.dtype)
        learned = matrix_weight(self.layer, values)
        _set_weight(self.layer, learned, scale.view(shape))
        after = self.errors()
        is_better = (after < before).view_as(problem.unit)
        if not torch.equal(scale, problem.scale):
            # Rows that share a scale decide together
            change = problem.per_unit((after - before).view_as(problem.unit))
            is_better = (change < 0)[problem.unit]
        rtn_rows = weight_matrix(self.layer, rtn)
        learned_rows = weight_matrix(self.layer, learned)
        rows = torch.where(is_better[..., None], learned_rows, rtn_rows)
        weight = matrix_weight(self.layer, rows)
        is_used = problem.per_unit(is_better.float()) > 0
        scale = torch.where(is_used, scale, problem.scale).view(shape)
        _set_weight(self.layer, weight, scale)
        errors = torch.where(is_better.flatten(), after, before)
        qparams = QParams(scale.cpu(), self.quantizer.zero_point.cpu())
        return RoundedWeight(weight.cpu(), qparams, float(before.sum()), float(errors.sum()))

    def problem(self, generator: torch.Generator) -> RoundingProblem:
        """Return the layer's least squares, over positions of its outputs drawn from all
        batches alike.
        """
        spec = self.quantizer.spec
        weight = weight_matrix(self.layer, self.weight).float()
        rtn = weight_matrix(self.layer, self.layer.get_parameter("weight")).float()
        scale = self.quantizer.scale.flatten().float()
        groups, rows, _ = weight.shape
        units = torch.arange(scale.numel(), device=scale.device)
        if scale.numel() == 1:
            unit = units.reshape(1, 1).expand(groups, rows)
        else:
            unit = units.reshape(groups, rows)
        inputs, targets = self.sampled(generator, weight.shape)
        return RoundingProblem(
            weight=weight,
            nearest=(rtn / scale[unit][..., None]).round(),
            inputs=inputs,
            targets=targets,
            scale=scale,
            zero_point=self.quantizer.zero_point.flatten().float(),
            unit=unit,
            quant_min=spec.quant_min,
            quant_max=spec.quant_max,
            power_of_two=spec.scale_type != "float",
            uncut=uncut(code_range_of(spec)),
        )

    def sampled(self, generator: torch.Generator, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return quantized inputs [groups, samples, depth] and float outputs without the bias
        [groups, samples, rows], for a weight matrix of `shape`.
        """
        groups, rows, depth = shape
        samples = min(max(16 * depth, _MIN_SAMPLES), _MAX_SAMPLES)
        samples = min(samples, max(256, _MAX_SAMPLED_VALUES // (groups * depth)))
        positions = sum(len(channel_rows(self.layer, target)) for target in self.targets)
        share = samples / max(1, positions)
        inputs, targets = [], []
        for call, target in zip(self.quantized.calls(self.node), self.targets, strict=True):
            outputs = channel_rows(self.layer, target)
            count = max(1, round(share * len(outputs)))
            drawn = torch.randperm(len(outputs), generator=generator)[:count]
            drawn = drawn.to(outputs.device)
            x = next(iter(call.values()))
            if "input" in self.layer.quantizers:
                x = self.layer.quantizers["input"](x)
            inputs.append(patches(self.layer, x, drawn).float())
            targets.append(outputs[drawn].float())
        all_targets = torch.cat(targets)
        bias = self.layer._parameters.get("bias")
        if bias is not None:
            all_targets = all_targets - bias.detach().float()
        by_group = all_targets.reshape(-1, groups, rows).transpose(0, 1)
        return torch.cat(inputs, 1), by_group

    def errors(self) -> Tensor:
        """Return the squared error of each output channel over all batches, float64 [channels].

        Raises:
            DataError: it is not finite.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)
        for target, output in zip(self.targets, self.quantized.compute(self.node), strict=True):
            if self.activation is not None:
                name = next(iter(self.activation.inputs))
                layers = [network.layers[self.activation.name] for network in self.networks]
                target = layers[0](**{name: target.clone()})
                output = layers[1](**{name: output.clone()})
            difference = channel_rows(self.layer, target - output)
            total = total + difference.double().square().sum(0)
        if not total.isfinite().all():
            raise DataError(
                f"the error of {self.node.name} is not finite: its outputs are infinite, or "
                "NaN",
                help="check the data and the weights, or give its activations more bits",
            )
        return total


def _fused_activation(graph: Graph, node: Node) -> Node | None:
    """Return the activation function that hardware applies to the node's output before anyone
    else reads it.
    """
    readers = graph.consumers[node.name]
    if len(readers) != 1 or not readers[0]:
        return None
    reader = graph.by_name[readers[0]]
    is_fused = reader.row.kind == "fusable" and len(list(reader.refs())) == 1
    return reader if is_fused else None


def _weight_quantizer(layer: Layer) -> TensorQuantizer:
    """Return the quantizer of the layer's weight, which must have one."""
    return cast(TensorQuantizer, layer.quantizers["weights"])


def _set_weight(layer: Layer, weight: Tensor, scale: Tensor) -> None:
    """Give a quantized layer a weight that is rounded to this scale."""
    set_parameter(layer, "weight", weight)
    _weight_quantizer(layer).scale = scale.to(layer.get_parameter("weight").device)
