"""The mean of a layer's output per channel, over batches. Keeps sums, never values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantizer.graph.ir import Node


def channel_axis(node: Node) -> int:
    """The axis of a layer's channels in its output, from the end, as a batch may be missing; the layer has one bias."""
    axis = node.row.channels
    assert axis is not None
    assert axis < 0 or node.shape is not None  # the output of a batch norm is one tensor
    return axis if axis < 0 else axis - len(node.shape or ())


class ChannelMean:
    """Sum and count per channel; each batch is summed in float32 at least, batches are added in float64.

    >>> mean = ChannelMean(ch_axis=-1)
    >>> mean.observe(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> mean.mean().tolist()
    [2.0, 20.0]
    """

    def __init__(self, ch_axis: int) -> None:
        self.ch_axis = ch_axis
        self._now = self._before = (0, 0, torch.zeros(1, dtype=torch.float64))  # batches, values per channel, sums

    def observe(self, x: Tensor) -> None:
        """Take in one batch, with channels along `ch_axis`."""
        batches, count, total = self._now
        rest = [axis for axis in range(-x.ndim, 0) if axis != self.ch_axis]
        dtype = torch.promote_types(x.dtype, torch.float32)  # float64 for all would read ten times as slowly
        one = (x.sum(rest, dtype=dtype) if rest else x).double().cpu()
        after = batches + 1, count + x.numel() // max(len(one), 1), total + one
        self._before, self._now = self._now, after

    def mean(self) -> Tensor:
        """float64 [channels]; NaN if no value was observed."""
        _, count, total = self._now
        return total / count if count else total / 0

    def forget_after(self, batches: int) -> None:
        """Drop what came after the first `batches` batches: the last one at most, if it was broken off."""
        if self._now[0] > batches:
            self._now = self._before

    def state_dict(self) -> dict[str, Tensor]:
        """All there is to keep: "batches" and "count", int64; "sum", float64 [channels]."""
        batches, count, total = self._now
        return {"batches": torch.tensor(batches), "count": torch.tensor(count), "sum": total}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by a state of `state_dict`."""
        self._now = self._before = int(state["batches"]), int(state["count"]), state["sum"].double()
