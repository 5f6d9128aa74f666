"""Empirical bias correction: give each quantized layer's output the mean per channel that it
has in the float network.

Changes biases only, after their quantization, and never a layer that runs in float.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias
Correction" (arXiv 1906.04721), section 4.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.calibration.events import RunStage
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.solution import quantized_network
from quantizer.calibration.statistics import ChannelMean
from quantizer.config.algorithms import ConfigChange, ConfigStep
from quantizer.config.wording import counted
from quantizer.distributed import merge_in_batch_order
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.graph.tracing.parameters import move_module
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner

STEP = ConfigStep(
    "bias correction",
    "a second pass over the data",
    (ConfigChange("biases corrected", setting="include_bias_corr"),),
    place=1,
)
"""What a search for gates tries with it."""


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
    runner = SequentialRunner(network, data, store, request.ranks)
    count = len(graph.nodes)
    with RunStage(request.events, "bias correction", count, "layers") as stage:
        corrections = correct_layer_biases(
            runner,
            state.calibration.means,
            as_codes=state.plan.settings.target_device == "DPU",
            after_layer=stage.advance,
        )
    sizes = {layer: float(correction.abs().max()) for layer, correction in corrections.items()}
    largest = max(sizes, key=sizes.__getitem__)
    layers = counted(len(corrections), "layer")
    text = f"biases of {layers} corrected, by at most {sizes[largest]:.3g} in {largest}"
    request.events.message(logging.INFO, text)
    solution = replace(state.solution, corrections=corrections)
    return replace(state, solution=solution)


def correct_layer_biases(
    runner: SequentialRunner,
    means: Mapping[str, ChannelMean],
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

    Args:
        runner: of the quantized network, before its first node. The network has the corrected
            biases afterwards.
        means: of the float network on the same batches, by layer.
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
                mean = means[node.name]
                corrections[node.name] = _correct(runner, node, mean, as_codes=as_codes)
            else:
                runner.finish(node)
            after_layer()
    return corrections


def _correct(
    runner: SequentialRunner, node: Node, float_mean: ChannelMean, *, as_codes: bool
) -> Tensor:
    """Find one layer's correction, and add it to the outputs, without computing them again."""
    layer = runner.network.layers[node.name]
    quantizer = layer.detach_output()
    ch_axis = float_mean.ch_axis
    batch_means: list[ChannelMean] = []

    def observed_outputs() -> Iterator[Tensor]:
        for output in runner.compute(node):
            batch_means.append(ChannelMean(ch_axis))
            batch_means[-1].observe(output)
            yield output

    outputs = runner.store(observed_outputs())
    quantized_mean = ChannelMean(ch_axis)
    place = f"bias correction of {node.name}"
    for batch_mean in merge_in_batch_order(runner.ranks.gather(batch_means, place)):
        quantized_mean.merge(batch_mean)
    weight = layer.get_parameter("weight")
    correction = (float_mean.mean() - quantized_mean.mean()).to(weight)
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
