"""Empirical bias correction: give each quantized layer's output the mean per channel that it
has in the float network.

Changes biases only, after their quantization, and never a layer that runs in float. It reads
samples until it is sure of the means.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias
Correction" (arXiv 1906.04721), section 4.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.events import RunStage
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.calibration.statistics import ChannelMean, next_kept
from quantizer.config.algorithms import ConfigChange, ConfigStep
from quantizer.config.roles import is_parameter
from quantizer.config.wording import counted
from quantizer.distributed import merge_in_batch_order
from quantizer.errors import DataError
from quantizer.graph.ir import Node, walk_back
from quantizer.graph.tracing.parameters import move_module
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner
from quantizer.plan.model import Plan

STEP = ConfigStep(
    "bias correction",
    "a second pass over the data",
    (ConfigChange("biases corrected", setting="include_bias_corr"),),
    place=1,
)
"""What a search for gates tries with it."""
_BATCHES = 4
_SAMPLES = 40
"""Fewer batches do not say how far apart they are. The mean of so many samples adds a tenth of
a decibel to the noise of a layer with one value a sample.
"""
_ALIKE = 2.0
"""The samples that were read stand for all if the float means of both are at most so many
standard errors apart.
"""
_SURE = 0.25
"""A correction is sure if its standard error is at most this share of the step in which the
output is rounded. The error of rounding itself is 0.29 steps, in every value.
"""


def run_bias_correction(
    request: CalibrationRequest, state: CalibrationState
) -> CalibrationState:
    """Correct biases so that each quantized layer has the mean output of the float layer.

    Raises:
        DataError: a correction is not finite, or the data are not the same when they are read
            again.
    """
    data = request.read_again("bias correction", "set include_bias_corr to false")
    graph = state.plan.graph
    network = quantized_network(graph, state.solution)
    network = move_module(network, graph.device)
    store = ActivationStore(request.memory)
    runner = SequentialRunner(network, data, store, request.ranks, first=_BATCHES)
    count = len(graph.nodes)
    with RunStage(request.events, "bias correction", count, "layers") as stage:
        corrections = correct_layer_biases(
            runner,
            state.calibration.means,
            output_steps(state.plan, state.solution),
            as_codes=state.plan.settings.target_device == "DPU",
            after_layer=stage.advance,
        )
    sizes = {layer: float(correction.abs().max()) for layer, correction in corrections.items()}
    largest = max(sizes, key=sizes.__getitem__)
    layers = counted(len(corrections), "layer")
    text = f"biases of {layers} corrected, by at most {sizes[largest]:.3g} in {largest}, after "
    text += counted(runner.samples, "sample")
    request.events.message(logging.INFO, text)
    solution = replace(state.solution, corrections=corrections)
    return replace(state, solution=solution)


def output_steps(plan: Plan, solution: Solution) -> dict[str, float]:
    """Return the smallest step in which the output of each corrected layer is rounded next, by
    layer. It is 0 for a layer whose output stays float, has scales found at run time, or is in
    a floating-point format.
    """
    rounded: dict[str, float] = {}
    for key, tensor in plan.tensors.items():
        if is_parameter(tensor.role):
            continue
        step = 0.0
        if tensor.is_calibrated and tensor.spec.dtype == "int":
            step = float(solution.tensors[key].scale.min())
        rounded[tensor.source] = min(step, rounded.get(tensor.source, step))

    def readers(node: Node) -> Sequence[str]:
        if node.name in rounded:
            return ()
        return [name for name in plan.graph.consumers[node.name] if name in plan.graph.by_name]

    steps = {}
    for layer in plan.corrected:
        # Without quantized activations, there is nothing to look for
        nodes = walk_back(plan.graph, [layer], readers) if rounded else ()
        next_steps = [rounded[node.name] for node in nodes if node.name in rounded]
        steps[layer] = min(next_steps, default=0.0)
    return steps


def correct_layer_biases(
    runner: SequentialRunner,
    means: Mapping[str, ChannelMean],
    steps: Mapping[str, float],
    *,
    as_codes: bool = False,
    after_layer: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Correct the biases of layers in execution order, each on quantized inputs that the
    corrections before it have changed.

    The mean is that of the layer's own output, before an activation function and before the
    output's quantizer. What is left of the shift is the noise of float arithmetic. With
    `as_codes`, half a step may be left, which later layers see, and more if the bias is
    clipped.

    Both networks are compared on the same batches, so that the differences of batches show the
    standard error of each channel's correction. From 40 samples on, a correction is sure if all
    of these errors are at most a quarter of the layer's step, or if the layer has one value a
    sample. The float means must also be near those of all samples. Until then, the runner reads
    more batches.

    Args:
        runner: of the quantized network, before its first node. The network has the corrected
            biases afterwards.
        means: of the float network on the same batches, by layer.
        steps: in which the outputs of these layers are rounded; 0 asks for all batches.
        as_codes: whether a quantized bias is rounded again after its correction, for devices
            that store a code. A bias that is not quantized is corrected exactly.
        after_layer: called after each node of the graph, for progress.

    Returns:
        Corrections of shape [channels] in the dtype of the layer's weight.

    Raises:
        DataError: a correction is not finite, or a layer cannot run on a batch; the layer is
            named.

    Source: Nagel et al. 2019 (see above); layer by layer as in Nagel et al. 2021, "A White
    Paper on Neural Network Quantization", section 3.4.
    """
    corrections = {}
    with torch.no_grad():
        for node in runner.network.graph.nodes:
            if node.name in means:
                mean, step = means[node.name], steps[node.name]
                correction = _correct(runner, node, mean, step, as_codes=as_codes)
                corrections[node.name] = correction
            else:
                runner.finish(node)
            after_layer()
    return corrections


def _correct(
    runner: SequentialRunner,
    node: Node,
    float_mean: ChannelMean,
    step: float,
    *,
    as_codes: bool,
) -> Tensor:
    """Find one layer's correction, and add it to the outputs, without computing them again."""
    layer = runner.network.layers[node.name]
    quantizer = layer.detach_output()
    ch_axis = float_mean.ch_axis
    quantized_mean = ChannelMean(ch_axis)
    outputs: list[Any] = []
    while True:
        outputs += _observed_outputs(runner, node, quantized_mean, len(outputs))
        if _is_sure(float_mean, quantized_mean, step, runner.samples):
            break
        if not runner.read_more(next_kept(runner.batches) - runner.batches, node):
            break
    mean = float_mean.mean_after(runner.batches)
    weight = layer.get_parameter("weight")
    correction = (mean - quantized_mean.mean()).to(weight)
    if not correction.isfinite().all():
        raise DataError(
            f"the bias correction of {node.name} is not finite: its outputs are infinite, or "
            "NaN",
            help="give its activations more bits, leave its weights float, or set "
            "include_bias_corr to false",
        )
    if as_codes and "bias" in layer.quantizers:
        bias = layer.get_parameter("bias")
        correction = layer.quantizers["bias"](bias + correction) - bias

    def corrected(output: Tensor) -> Tensor:
        output.movedim(ch_axis, -1).add_(correction)
        return output if quantizer is None else output.copy_(quantizer(output))

    runner.change(outputs, corrected)
    runner.release(outputs)
    layer.correct_bias(correction)
    if quantizer is not None:
        layer.attach("activation", quantizer)
    return correction.cpu()


def _observed_outputs(
    runner: SequentialRunner, node: Node, mean: ChannelMean, start: int
) -> list[Any]:
    """Return the stored outputs of this rank's batches from number `start` on, and show those
    of all ranks to the mean.
    """
    batch_means: list[ChannelMean] = []

    def observed() -> Iterator[Tensor]:
        for output in runner.compute(node, start):
            batch_means.append(ChannelMean(mean.ch_axis))
            batch_means[-1].observe(output)
            yield output

    outputs = runner.store(observed())
    shards = runner.ranks.gather(batch_means, f"bias correction of {node.name}")
    first = mean.batches % len(shards)
    for batch_mean in merge_in_batch_order(shards[first:] + shards[:first]):
        mean.merge(batch_mean)
    return outputs


def _is_sure(
    float_mean: ChannelMean, quantized_mean: ChannelMean, step: float, samples: int
) -> bool:
    """Check whether the difference of two means is sure in all channels after some samples."""
    if samples < _SAMPLES or quantized_mean.batches < _BATCHES:
        return False
    counts: list[int] = []
    float_sums: list[Tensor] = []
    differences: list[Tensor] = []
    for batches, (count, quantized_sum) in sorted(quantized_mean.sums.items()):
        _, float_sum = float_mean.sums[batches]
        counts.append(count)
        float_sums.append(float_sum)
        differences.append(float_sum - quantized_sum)
    # Data in an order, such as by class, begin with samples that are unlike the others
    distance = (float_mean.mean() - float_sums[-1] / counts[-1]).norm()
    if distance > _ALIKE * _standard_error(counts, float_sums).norm():
        return False
    if quantized_mean.count == samples:
        return True
    error = _standard_error(counts, differences)
    return bool((error <= _SURE * step).all())


def _standard_error(counts: Sequence[int], sums: Sequence[Tensor]) -> Tensor:
    """Return the standard error of the mean of each channel, from the spread of batches.

    Args:
        counts: how many values a channel had after some numbers of batches.
        sums: of these values, float64 [channels].
    """
    after = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    totals = torch.stack([*sums])
    mean = totals[-1] / after[-1]
    # Of each group of batches, without those before it
    counts_of_groups = after.diff(dim=0, prepend=torch.zeros_like(after[:1]))
    totals_of_groups = totals.diff(dim=0, prepend=torch.zeros_like(totals[:1]))
    distances = totals_of_groups / counts_of_groups - mean
    variance = (counts_of_groups * distances.square()).sum(0) / (len(counts) - 1)
    return (variance / after[-1]).sqrt()
