"""Empirical bias correction: give each quantized layer's output the mean per channel that it
has in the float network.

Changes biases only, after their quantization, and never a layer that runs in float.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias
Correction" (arXiv 1906.04721), section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.distributed import merge_in_batch_order
from quantizer.errors import DataError
from quantizer.graph.ir import Node


def channel_axis(node: Node) -> int:
    """Return the axis of a layer's channels in its output, counted from the end, as the batch
    axis may be missing. The layer must have one bias.
    """
    axis = node.row.channels
    assert axis is not None
    if axis < 0:
        return axis
    assert node.shape is not None  # the output of a batch norm is one tensor
    return axis - node.rank


class ChannelMean:
    """Collects the mean of each channel. A batch is summed in float32 at least, and batches are
    added in float64.

    >>> mean = ChannelMean(ch_axis=-1)
    >>> mean.observe(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> mean.mean().tolist()
    [2.0, 20.0]
    """

    def __init__(self, ch_axis: int) -> None:
        self.ch_axis = ch_axis
        # Batches, values per channel, sums
        self._now = (0, 0, torch.zeros(1, dtype=torch.float64))
        self._before = self._now

    def observe(self, x: Tensor) -> None:
        """Take in one batch, with channels along `ch_axis`."""
        batches, count, total = self._now
        others = [axis for axis in range(-x.ndim, 0) if axis != self.ch_axis]
        # Reading all in float64 would be ten times as slow
        dtype = torch.promote_types(x.dtype, torch.float32)
        sums = x.sum(others, dtype=dtype) if others else x
        sums = sums.double().cpu()
        count += x.numel() // max(len(sums), 1)
        self._before = self._now
        self._now = (batches + 1, count, total + sums)

    def merge(self, other: ChannelMean) -> None:
        """Take in what another has seen. Merging single batches in order gives the same as
        observing them.
        """
        batches, count, total = self._now
        more_batches, more_count, more_total = other._now
        self._now = (batches + more_batches, count + more_count, total + more_total)
        self._before = self._now

    @property
    def batches(self) -> int:
        """Return how many it has taken in."""
        return self._now[0]

    def mean(self) -> Tensor:
        """Return the mean, float64 [channels]; NaN if no value was observed."""
        _, count, total = self._now
        return total / count if count else total / 0

    def forget_after(self, batches: int) -> None:
        """Drop what came after the first `batches` batches. That is one at most, which was
        interrupted.
        """
        if self.batches > batches:
            self._now = self._before

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: "batches" and "count", int64; "sum", float64 [channels]."""
        batches, count, total = self._now
        return {"batches": torch.tensor(batches), "count": torch.tensor(count), "sum": total}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by a state of `state_dict`.

        Raises:
            ValueError: it is something else.
        """
        batches = int(state["batches"])
        count = int(state["count"])
        total = state["sum"].double()
        is_count = min(batches, count) >= 0 and bool(batches) == bool(count)
        if not is_count or total.dim() != 1 or not total.isfinite().all():
            raise ValueError(
                f"the sum of {count} outputs in {batches} batches is not a sum of finite values"
            )
        self._now = (batches, count, total)
        self._before = self._now


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
