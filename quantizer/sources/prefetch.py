"""Reads batches in a thread, ahead of the one that is used."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quantizer.sources.batches import Batch

_END: Any = object()


def prefetched(read: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """Yield batches that a thread reads up to two batches ahead.

    If reading a batch raises an error, it is raised here instead of that batch. The thread
    ends when the iterator is exhausted or closed.
    """
    batches = read()
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(thread.submit(next, batches, _END) for _ in range(2))
        while True:
            batch = ahead.popleft().result()
            if batch is _END:
                return
            ahead.append(thread.submit(next, batches, _END))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)
