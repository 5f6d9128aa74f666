"""The mean of each channel of what a layer computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
