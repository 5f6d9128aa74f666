"""Calibration by several ranks. Each observes its share of the batches; then all have the same
statistics as one process that has observed all.

Ranges and mean outputs are merged in the order of the batches, and histograms merge exactly, so
the number of ranks does not change the results.
"""

import time
from collections.abc import Iterable

from quantizer.calibration.channel_mean import ChannelMean
from quantizer.calibration.observing import Calibration, Observable, watchers
from quantizer.distributed import Ranks, merge_in_batch_order
from quantizer.nn.network import Watchers
from quantizer.observers import find_ranges
from quantizer.sources.batches import Batch, prefix_batch_errors

_EXCHANGE_S = 15.0
"""Seconds between exchanges. A stopped run loses what it has observed since the last one."""
_MAX_EXCHANGE_BATCHES = 64
"""Most batches of a rank between two exchanges."""


def observe_share(
    calibration: Calibration, network: Observable, batches: Iterable[Batch], ranks: Ranks
) -> None:
    """Observe each batch on its rank, and merge the statistics of all ranks.

    Raises:
        DataError: NaN or Inf in a tensor (layer and batch are named).
        RankError: the ranks do not have the same batches.
    """
    shard = _Shard(calibration)
    first = calibration.batches
    began = time.monotonic()
    batch_s = 0.0
    # The first exchange shows how long a batch takes
    batches_per_rank = 1
    since = 0
    for number, batch in enumerate(batches):
        if ranks.owns(number):
            with prefix_batch_errors(first + number, batch):
                shard.observe(network, batch)
        since += 1
        if since == batches_per_rank * ranks.world_size:
            shard.exchange(ranks, since)
            if not batch_s:
                seconds = ranks.gather(time.monotonic() - began, "the time of a batch")
                batch_s = max(seconds) or 1e-3
            batches_per_rank = max(1, int(_EXCHANGE_S / batch_s))
            batches_per_rank = min(_MAX_EXCHANGE_BATCHES, batches_per_rank)
            since = 0
    shard.exchange(ranks, since)


class _Shard:
    """What a rank has observed since the last exchange, and the calibration that it is merged
    into.
    """

    def __init__(self, whole: Calibration) -> None:
        self._whole = whole
        self._clear()

    def observe(self, network: Observable, batch: Batch) -> None:
        """Observe one batch of this rank's share."""
        network.observe(batch.args, batch.kwargs, self._watchers)
        find_ranges(self._part.calibrated.values())
        self._means.append(self._part.means)
        self._start_batch()

    def exchange(self, ranks: Ranks, batches: int) -> None:
        """Merge what all ranks have observed of so many batches."""
        whole = self._whole
        place = f"calibration after {whole.batches + batches} batches"
        shards = ranks.gather((self._part.calibrated, self._means), place)
        for key, observer in whole.calibrated.items():
            observer.merge(*(observers[key] for observers, _ in shards))
        for means in merge_in_batch_order(means for _, means in shards):
            for layer, mean in means.items():
                whole.means[layer].merge(mean)
        whole.batches += batches
        self._clear()

    def _clear(self) -> None:
        self._part = self._whole.fresh()
        # Means of each batch are merged one by one, in the order of the batches
        self._means: list[dict[str, ChannelMean]] = []
        self._start_batch()

    def _start_batch(self) -> None:
        self._part.means = self._whole.fresh().means
        self._watchers: Watchers = watchers(self._part)
