"""Split networks into segments that several executions run one after the other, so that a
weight in a file is read once for all of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quantizer.graph.ir import Node
from quantizer.nn.network import Execution, Network, deferred_tensors
from quantizer.storage.deferred_tensor import DeferredTensor, keep_loaded

_BYTES_OF_SMALL_WEIGHTS = 1 << 24
"""Layers share a segment if their weights have fewer bytes together, and no more than the
weights of the largest layer.
"""


@dataclass(frozen=True)
class Segment:
    """Nodes that run before the executions of other batches run them, too.

    Attributes:
        start: the index of the first node.
        stop: the index after the last node.
        weights: those of the nodes that are in files.
    """

    start: int
    stop: int
    weights: Sequence[DeferredTensor]


def segments(networks: Sequence[Network], start: int = 0) -> list[Segment]:
    """Return the segments of networks with the same nodes, from the node of index `start` on.

    A segment has one layer with large weights, or several with small ones. If no weight is in a
    file, there is one segment.
    """
    nodes = networks[0].graph.nodes
    if not any(network.graph.is_deferred for network in networks):
        whole = Segment(start, len(nodes), [])
        return [whole]
    weights_of_nodes = [_deferred_weights(networks, node) for node in nodes]
    sizes = list(map(total_bytes, weights_of_nodes))
    most_bytes = min(max(sizes), _BYTES_OF_SMALL_WEIGHTS)
    result: list[Segment] = []
    weights: list[DeferredTensor] = []
    for index in range(start, len(nodes)):
        size = total_bytes(weights) + sizes[index]
        if weights and sizes[index] and size > most_bytes:
            segment = Segment(start, index, weights)
            result.append(segment)
            start = index
            weights = []
        weights = weights + weights_of_nodes[index]
    segment = Segment(start, len(nodes), weights)
    result.append(segment)
    return result


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes the values of tensors have."""
    return sum(tensor.nbytes for tensor in tensors)


def deferred_weights(networks: Sequence[Network]) -> list[DeferredTensor]:
    """Return the weights of networks that are in files."""
    weights: list[DeferredTensor] = []
    for network in networks:
        for layer in network.layers.values():
            weights += deferred_tensors(layer)
    return weights


def _deferred_weights(networks: Sequence[Network], node: Node) -> list[DeferredTensor]:
    """Return the weights of a node's layers that are in files."""
    weights: list[DeferredTensor] = []
    for network in networks:
        weights += deferred_tensors(network.layers[node.name])
    return weights


def finish_together(
    network: Network, executions: list[Execution], finished: Callable[[int, Execution], None]
) -> None:
    """Run executions to the end, segment by segment.

    Args:
        network: what they execute.
        executions: at any nodes. The list is emptied, so that it does not keep their values.
        finished: called with the index of an execution and the execution, once it is at its
            end. Then its values are freed, unless something else refers to it.
    """
    pending = dict(enumerate(executions))
    executions.clear()
    positions = [execution.position for execution in pending.values()]
    end = len(network.graph.nodes)
    for segment in segments([network], min(positions, default=end)):
        with keep_loaded(segment.weights):
            for index in list(pending):
                pending[index].advance(segment.stop)
                if segment.stop == end:
                    finished(index, pending.pop(index))
