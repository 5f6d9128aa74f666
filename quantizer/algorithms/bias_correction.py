"""Empirical bias correction: each quantized layer's output gets back the mean per channel that
it has in float.

Changes biases only, after their quantization, and never a layer that runs in float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.distributed import in_turn
from quantizer.errors import DataError
from quantizer.graph.ir import Node


def channel_axis(node: Node) -> int:
    """The axis of a layer's channels in its output, from the end, as a batch may be missing;
    the layer has one bias.
    """
    axis = node.row.channels
    assert axis is not None
    assert axis < 0 or node.shape is not None  # the output of a batch norm is one tensor
    return axis if axis < 0 else axis - node.rank


class ChannelMean:
    """Sum and count per channel; each batch is summed in float32 at least, batches are added in
    float64.

    >>> mean = ChannelMean(ch_axis=-1)
    >>> mean.observe(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> mean.mean().tolist()
    [2.0, 20.0]
    """

    def __init__(self, ch_axis: int) -> None:
        self.ch_axis = ch_axis
        # Batches, values per channel, sums
        self._now = self._before = (0, 0, torch.zeros(1, dtype=torch.float64))

    def observe(self, x: Tensor) -> None:
        """Take in one batch, with channels along `ch_axis`."""
        batches, count, total = self._now
        rest = [axis for axis in range(-x.ndim, 0) if axis != self.ch_axis]
        # Float64 for all would read ten times as slowly
        dtype = torch.promote_types(x.dtype, torch.float32)
        one = (x.sum(rest, dtype=dtype) if rest else x).double().cpu()
        after = batches + 1, count + x.numel() // max(len(one), 1), total + one
        self._before, self._now = self._now, after

    def merge(self, other: ChannelMean) -> None:
        """Take in what another saw. Those of single batches, merged in their order, make what
        one would have seen.
        """
        now, more = self._now, other._now
        self._now = self._before = now[0] + more[0], now[1] + more[1], now[2] + more[2]

    @property
    def batches(self) -> int:
        """How many it has taken in."""
        return self._now[0]

    def mean(self) -> Tensor:
        """float64 [channels]; NaN if no value was observed."""
        _, count, total = self._now
        return total / count if count else total / 0

    def forget_after(self, batches: int) -> None:
        """Drop what came after the first `batches` batches: the last one at most, if it was
        broken off.
        """
        if self._now[0] > batches:
            self._now = self._before

    def state_dict(self) -> dict[str, Tensor]:
        """All there is to keep: "batches" and "count", int64; "sum", float64 [channels]."""
        batches, count, total = self._now
        return {"batches": torch.tensor(batches), "count": torch.tensor(count), "sum": total}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by a state of `state_dict`.

        Raises:
            ValueError: it is something else.
        """
        batches, count, total = (
            int(state["batches"]),
            int(state["count"]),
            state["sum"].double(),
        )
        if (
            min(batches, count) < 0
            or bool(batches) != bool(count)
            or total.dim() != 1
            or not total.isfinite().all()
        ):
            raise ValueError(
                f"the sum of {count} outputs in {batches} batches is no sum of finite values"
            )
        self._now = self._before = batches, count, total


def correct_biases(
    runner: SequentialRunner,
    means: Mapping[str, ChannelMean],
    *,
    as_codes: bool = False,
    after_layer: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """What to add to the bias of each layer in `means`, that gives it this mean output over the
    runner's batches.

    Layers are corrected in execution order, each on inputs that are quantized and corrected
    already. The mean is that of the layer's own output, before an activation function and
    before the output's quantizer, and the difference left is that of float arithmetic.
    `as_codes` leaves a quantized bias one that has a code, for devices that store it: half a
    step may be left then, which later layers see, and more if the bias is clipped.

    Args:
        runner: of the quantized network, before its first node; the network has the corrected
            biases afterwards.
        means: of the float network on the same batches, by layer.
        as_codes: whether corrected biases are rounded again; a bias that is not quantized is
            corrected exactly.
        after_layer: called after each node of the graph, for progress.

    Returns:
        Corrections of shape [channels] in the dtype of the layer's weight.

    Raises:
        DataError: a correction is not finite, or a layer cannot run on a batch; the layer is
            named.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
    Correction", 2019, section 4.2; sequential as in Nagel et al., "A White Paper on Neural
    Network Quantization", 2021, section 3.4.
    """
    corrections = {}
    with torch.no_grad():
        for node in runner.network.graph.nodes:
            if node.name in means:
                corrections[node.name] = _correct(runner, node, means[node.name], as_codes)
            else:
                runner.done(node)
            if after_layer is not None:
                after_layer()
    return corrections


def _correct(
    runner: SequentialRunner, node: Node, target: ChannelMean, as_codes: bool
) -> Tensor:
    """Find one layer's correction and hand on its outputs with it, without computing them
    again.
    """
    layer, own = runner.network.layers[node.name], list[ChannelMean]()
    quantizer = layer.detach_output()

    def outputs() -> Iterator[Tensor]:
        for output in runner.compute(node):
            own.append(ChannelMean(target.ch_axis))
            own[-1].observe(output)
            yield output

    kept, found = runner.keep(outputs()), ChannelMean(target.ch_axis)
    for batch in in_turn(runner.ranks.gather(own, f"bias correction of {node.name}")):
        found.merge(batch)
    weight = layer.get_parameter("weight")
    correction = (target.mean() - found.mean()).to(weight)
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
        output.movedim(target.ch_axis, -1).add_(correction)
        return output if quantizer is None else output.copy_(quantizer(output))

    runner.change(kept, corrected)
    runner.release(kept)
    layer.correct_bias(correction)
    if quantizer is not None:
        layer.attach("activation", quantizer)
    return correction.cpu()
