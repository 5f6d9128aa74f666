"""Which batches run as one, because a call costs more than a few tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quantizer.graph.ir import Graph
from quantizer.storage.deferred_tensor import CPU

_IDS = 1024
_IDS_OF_A_DEVICE = 8192
"""Up to this many token ids run as one batch: on the CPU, and elsewhere."""
NumberedInputs = tuple[int, list[Any]]
"""The number of a batch, and what it gives the network."""


def joinable(graph: Graph, batches: Iterable[NumberedInputs]) -> Iterator[list[NumberedInputs]]:
    """Yield consecutive batches of token ids of one length, of few ids together. Other batches
    are yielded one by one.
    """
    if not _reads_ids(graph):
        for row in batches:
            yield [row]
        return
    most = _IDS if graph.device == CPU else _IDS_OF_A_DEVICE
    parts: list[NumberedInputs] = []
    room = 0
    lengths: list[Any] = []
    for number, inputs in batches:
        size = max(value.numel() for value in inputs)
        new_lengths = [value.shape[1:] for value in inputs]
        if parts and (size > room or new_lengths != lengths):
            yield parts
            parts = []
        if not parts:
            room = most
            lengths = new_lengths
        room -= size
        parts.append((number, inputs))
    if parts:
        yield parts


def _reads_ids(graph: Graph) -> bool:
    """Check whether all inputs are integers whose first axis is the batch, of any size."""
    nodes = [node for node in graph.nodes if node.op == "input"]
    return all(node.shape and node.shape[0] is None and not node.is_float for node in nodes)
