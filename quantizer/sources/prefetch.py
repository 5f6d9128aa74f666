"""Prepares the next batches in one thread while the model computes: no processes, no pickling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_AHEAD = 2
_END: Any = object()


def prefetched(items: Callable[[], Iterator[T]]) -> Iterator[T]:
    """The elements of `items()` in order, up to two of them ahead; an exception comes where its element would.

    The thread ends when the iterator is exhausted or closed.

    >>> list(prefetched(lambda: iter(range(4))))
    [0, 1, 2, 3]
    """
    source, thread = items(), ThreadPoolExecutor(1, "prefetch")
    try:
        coming = deque(thread.submit(next, source, _END) for _ in range(_AHEAD))
        while (element := coming.popleft().result()) is not _END:
            coming.append(thread.submit(next, source, _END))
            yield element
    finally:
        thread.shutdown(cancel_futures=True)
