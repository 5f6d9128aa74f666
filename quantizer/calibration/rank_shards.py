"""Calibration by several ranks: each observes its share of the batches, and all keep what one
process would.

Ranges and mean outputs are taken up in the order of the batches, histograms merge exactly, so
the number of ranks cannot be seen.
"""

import time
from collections.abc import Iterable

from quantizer.algorithms.bias_correction import ChannelMean
from quantizer.calibration.observing import Calibration, Observable, watchers
from quantizer.distributed import Ranks, in_turn
from quantizer.nn.execution import Watchers
from quantizer.observers import find_ranges
from quantizer.sources.batches import Batch, naming_batch

APART_S = 15.0
"""Ranks exchange what they have seen about as often: a stopped run loses what they have not."""
MOST = 64  # batches of a rank between two exchanges


def observe(
    calibration: Calibration, network: Observable, batches: Iterable[Batch], ranks: Ranks
) -> None:
    """Observe every batch, on the rank that it belongs to; afterwards the calibration of each
    rank has seen all.

    Raises:
        DataError: NaN or Inf in a tensor (layer and batch are named).
        RankError: the ranks do not have the same batches.
    """
    shard, first, since = _Shard(calibration), calibration.batches, 0
    apart, began = 1, time.monotonic()  # the first exchange shows how long a batch takes
    for number, batch in enumerate(batches):
        if ranks.owns(number):
            with naming_batch(first + number):
                shard.observe(network, batch)
        since += 1
        if since == apart * ranks.world_size:
            shard.exchange(ranks, since)
            if not shard.seconds:
                shard.seconds = (
                    max(ranks.gather(time.monotonic() - began, "the time of a batch")) or 1e-3
                )
            apart, since = min(MOST, max(1, int(APART_S / shard.seconds))), 0
    shard.exchange(ranks, since)


class _Shard:
    """What a rank has seen since the last exchange, and the calibration that takes it up."""

    def __init__(self, whole: Calibration) -> None:
        self.whole, self.seconds = whole, 0.0
        self._clear()

    def observe(self, network: Observable, batch: Batch) -> None:
        """One batch of this rank's share."""
        network.observe(batch.args, batch.kwargs, self._watchers)
        find_ranges(self._own.calibrated.values())
        self._means.append(self._own.means)
        self._means_of_one_batch()

    def exchange(self, ranks: Ranks, batches: int) -> None:
        """Take up what all ranks have seen of so many batches."""
        whole = self.whole
        place = f"calibration after {whole.batches + batches} batches"
        shards = ranks.gather((self._own.calibrated, self._means), place)
        for key, observer in whole.calibrated.items():
            observer.merge(*(observers[key] for observers, _ in shards))
        for means in in_turn(means for _, means in shards):
            for layer, mean in means.items():
                whole.means[layer].merge(mean)
        whole.batches += batches
        self._clear()

    def _clear(self) -> None:
        self._own, self._means = self.whole.fresh(), list[dict[str, ChannelMean]]()
        self._means_of_one_batch()

    def _means_of_one_batch(self) -> None:
        self._own.means = self.whole.fresh().means
        self._watchers: Watchers = watchers(self._own)
