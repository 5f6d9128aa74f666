"""Prepares the next batches in one thread while the model computes: no processes, no pickling."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_DEPTH = 2
_POLL_SECONDS = 0.1


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetched(items: Callable[[], Iterator[T]]) -> Iterator[T]:
    """The elements of `items()` in order, up to two of them ahead; an exception comes where its element would.

    The thread ends when the iterator is exhausted or closed.

    >>> list(prefetched(lambda: iter(range(4))))
    [0, 1, 2, 3]
    """
    ready: queue.Queue[T | _Raised | None] = queue.Queue(_DEPTH)
    stop = threading.Event()

    def put(element: T | _Raised | None) -> None:
        while not stop.is_set():
            try:
                ready.put(element, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items():
                put(item)
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that reads
            put(_Raised(error))

    thread = threading.Thread(target=produce, daemon=True, name="prefetch")
    thread.start()
    try:
        while (element := ready.get()) is not None:
            if isinstance(element, _Raised):
                raise element.error
            yield element
    finally:
        stop.set()
        thread.join()
