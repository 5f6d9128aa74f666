"""Decide how many batches run in step, and which weights stay on a GPU, so that a weight in a
file is read once for all batches.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from quantizer.algorithms.activation_store import half_of_what_is_free
from quantizer.calibration.memory_prediction import (
    MOST_BATCHES_IN_STEP,
    MOST_BYTES_IN_STEP,
    bytes_in_step,
)
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.nn.segments import deferred_weights, total_bytes
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import CPU, keep_loaded


class GroupLimit:
    """Limits the batches that run in step, so that the values of all of them fit into memory.

    If no weight is in a file, each batch runs alone.

    Args:
        graph: of the networks that run.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def has_room(self, batches: Sequence[Batch]) -> bool:
        """Return whether another batch fits, if it is as large as the last of `batches`."""
        if not self._graph.is_deferred or len(batches) >= MOST_BATCHES_IN_STEP:
            return False
        sizes = [_input_values(batch) for batch in batches]
        return sum(sizes) + sizes[-1] <= self._most_values

    @cached_property
    def _most_values(self) -> float:
        """Return how many values the inputs of all batches together may have."""
        graph = self._graph
        budget = half_of_what_is_free(graph.device)
        if graph.device == CPU:
            budget = min(budget, MOST_BYTES_IN_STEP)
        samples = budget / max(1, bytes_in_step(graph, 1))
        return samples * _traced_values(graph)


def keep_on_device(networks: Sequence[Network]) -> AbstractContextManager[None]:
    """Keep the weights of networks on their GPU inside the `with` block, if at most half of the
    free memory is enough. Then each weight is read and decoded once.
    """
    device = networks[0].graph.device
    if device == CPU:
        return keep_loaded([])
    weights = deferred_weights(networks)
    if total_bytes(weights) > half_of_what_is_free(device):
        return keep_loaded([])
    return keep_loaded(weights)


def _input_values(batch: Batch) -> int:
    """Return how many values the largest input of a batch has."""
    return max(tensor.numel() for _, tensor in batch.tensors())


def _traced_values(graph: Graph) -> int:
    """Return how many values the largest input has for one sample of the traced length."""
    largest = 1
    for node in graph.nodes:
        if node.op == "input" and node.shape is not None:
            sizes = [1 if size is None else size for size in node.shape]
            largest = max(largest, math.prod(sizes))
    return largest
