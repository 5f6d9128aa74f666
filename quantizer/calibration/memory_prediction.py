"""Predicts the peak memory of a calibration or a test, on top of what is resident, and checks
that the machine has it. It counts what is large: weights, activations, Gram matrices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from quantizer.config.algorithms import Algorithm
from quantizer.config.model import ResolvedConfig
from quantizer.config.roles import is_parameter
from quantizer.errors import OutOfMemoryError
from quantizer.graph.ir import Graph, Node
from quantizer.layerwise.sequential_runner import half_of_what_is_free
from quantizer.option_words import Sentence
from quantizer.plan.model import Key, Plan, TensorSpecs
from quantizer.plan.size import (
    COPIES,
    HOLES,
    alive_bytes,
    pass_bytes,
    read_bytes,
    resident_bytes,
    value_bytes,
    working_bytes,
)
from quantizer.plugins import plugins
from quantizer.storage import process_memory
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.process_memory import keeps_freed_blocks, trim_heap

logger = logging.getLogger(__name__)

PLANE = 2
"""The spatial axes of a convolution of images."""
SURE = 1.2
"""A run is refused only if it needs this many times the memory of the machine."""
SEARCHED = 8
"""Copies in float32 while the scales of a weight are searched."""
IN_COLUMNS = 14
"""Copies in float32 while a weight is rounded column by column. They are float, rounded,
transposed and ordered, with errors, scales and zero points, and a second solution. All layers
with one input are solved together.
"""
GRADIENTS = 2
"""Copies of an output while its gradient is drawn."""

MOST_BATCHES_IN_STEP = 16
"""Batches that test mode runs in step, if weights are in files."""
MOST_BYTES_IN_STEP = 1 << 28
"""Bytes of the values of these batches on the CPU. It reads weights from the system's cache of
files, so that more memory saves little time.
"""


@dataclass(frozen=True)
class BatchSizes:
    """What the memory of activations depends on.

    Args:
        size: samples per batch.
        batches: how many batches there are.
        budget: bytes of activations that may stay in memory; None for half of what is free.
    """

    size: int
    batches: int = 1
    budget: int | None = None

    def stored_bytes(self, batch_bytes: int) -> int:
        """Return the bytes in memory of values of all batches, within the budget."""
        budget = half_of_what_is_free() if self.budget is None else self.budget
        return min(budget, self.batches * batch_bytes)


def calibration_bytes(
    plan: Plan, config: ResolvedConfig, data: BatchSizes, *, finetuned: bool = False
) -> int:
    """Return what calibration adds to a process that has the model, its graph and its plan.

    It is the memory of its largest step, and of the results of the steps before.
    """
    graph = plan.graph
    algorithms = config.algorithms
    layers = _quantized_layers(plan.tensors)
    peak = _weights_bytes(graph, layers)
    if plan.needs_data or finetuned or any(settings.needs_data for settings in algorithms):
        peak = max(peak, _reordered_bytes(graph) + pass_bytes(graph, data.size))
    if algorithms:
        peak = max(peak, _algorithm_bytes(graph, layers, algorithms, data))
    if finetuned or plan.corrected:
        peak = max(peak, _layer_by_layer_bytes(graph, data, both=finetuned))
    if graph.is_deferred:
        return _with_holes(peak)
    # Codes of one byte, and another float weight for each algorithm that changes it
    copies = len(algorithms) + finetuned
    return peak + _parameter_count(graph, layers) * (1 + 4 * copies)


def comparison_bytes(graph: Graph, specs: TensorSpecs, size: int, batches: int = 1) -> int:
    """Return what test mode adds to a process that has the model and its graph.

    It runs two networks in step, on batches of `size` samples. If weights are in files, several
    batches run in step, too.
    """
    layers = _quantized_layers(specs)
    alive = alive_bytes(graph, size)
    peak = _weights_bytes(graph, layers)
    for node in graph.nodes:
        if node.op == "input":
            continue
        during, after = alive[node.name]
        value = value_bytes(graph, node.name, size)
        working = working_bytes(graph, node, size) + read_bytes(graph, node)
        running = resident_bytes(graph, after + during + working, value, copies=2)
        # The quantized value, and its difference from the float one
        comparing = resident_bytes(graph, 2 * after + 3 * value, value, copies=5)
        peak = max(peak, running, comparing)
    if graph.is_deferred:
        others = min(batches, MOST_BATCHES_IN_STEP) - 1
        peak += min(others * bytes_in_step(graph, size), MOST_BYTES_IN_STEP)
        return _with_holes(peak)
    # Codes, and the values that they stand for
    return peak + 5 * _parameter_count(graph, layers)


def bytes_in_step(graph: Graph, size: int) -> int:
    """Return the most bytes that test mode keeps of a batch while other batches run the layers
    before, in both networks.
    """
    alive = alive_bytes(graph, size)
    largest = 0
    for before, node in pairwise(graph.nodes):
        if node.params:
            _, after = alive[before.name]
            largest = max(largest, after)
    return 2 * largest


class ProcessMemory(NamedTuple):
    """The memory of a process in bytes: `resident` now, and the `peak` so far. None if the
    system does not report it.
    """

    resident: int | None
    peak: int | None

    @staticmethod
    def now() -> ProcessMemory:
        """Return those of this process, without memory that is freed already."""
        trim_heap()
        return ProcessMemory(process_memory.resident_bytes(), process_memory.peak_bytes())


def peak_with(more: int, base: ProcessMemory | None = None) -> int | None:
    """Return the peak of a process that takes so many bytes on top of what is resident.

    Args:
        more: the bytes.
        base: the process; None for this one.

    Returns:
        The peak; None if it is not known.
    """
    resident, peak = base or ProcessMemory.now()
    if resident is None or peak is None:
        return None
    return max(peak, resident + more)


def require_room(mode: str, more: int, remedies: Sequence[str]) -> None:
    """Check that the machine has so many more bytes of memory, and warn if they are not free.

    Swap may help, and other processes may end.

    Raises:
        OutOfMemoryError: the machine, or the control group of this process, does not have them
            at all.
    """
    peak = peak_with(more)
    free = process_memory.available_bytes()
    total = process_memory.total_bytes()
    if peak is None or free is None or total is None or more <= free:
        return
    remedy = "; or ".join(remedies)
    in_words = process_memory.size_text
    if peak > SURE * total:
        text = (
            f"{mode} would need about {in_words(peak)} of memory, and the machine has "
            f"{in_words(total)}"
        )
        raise OutOfMemoryError(text, help=remedy)
    text = (
        f"{mode} needs about {in_words(more)} more memory, and {in_words(free)} are free: "
        f"{remedy}"
    )
    logger.warning("%s", text)


def remedies(graph: Graph) -> list[str]:
    """Return what takes less memory."""
    texts: list[str] = [Sentence("use a smaller <--batch_size>")]
    if graph.is_deferred:
        return texts
    for plugin in plugins():
        forms = [kind.form for kind in plugin.models if kind.defers_weights]
        texts += [f"give {form}, whose weights stay in their files" for form in forms]
    return texts


def _quantized_layers(keys: Collection[Key]) -> set[str]:
    """Return the layers with quantized parameters."""
    return {name for name, role in keys if is_parameter(role)}


def _parameter_paths(graph: Graph, layers: Collection[str]) -> set[str]:
    """Return the paths of the parameters of these layers."""
    paths: set[str] = set()
    for name in layers:
        paths.update(graph.by_name[name].params.values())
    return paths


def _parameter_count(graph: Graph, layers: Collection[str]) -> int:
    """Return how many values the parameters of these layers have."""
    paths = _parameter_paths(graph, layers)
    return sum(graph.tensors[path].numel() for path in paths)


def _weights_bytes(graph: Graph, layers: Collection[str]) -> int:
    """Return the bytes for the largest weight that is rounded, or that is only read from its
    file.
    """
    peak = 0
    for path in _parameter_paths(graph, layers):
        peak = max(peak, COPIES * graph.tensors[path].nbytes)
    for tensor in graph.tensors.values():
        if isinstance(tensor, DeferredTensor):
            peak = max(peak, tensor.nbytes)
    return peak


def _reordered_bytes(graph: Graph) -> int:
    """Return the bytes of the weights that `weights_last` copies."""
    if graph.is_deferred:
        return 0
    total = 0
    for node in graph.nodes:
        is_convolution = node.row.spatial == PLANE and not node.row.transposed
        if is_convolution and "weight" in node.params:
            weight = graph.weight(node)
            if weight.shape[2:].numel() > 1:
                total += weight.nbytes
    return total


def _layer_by_layer_bytes(graph: Graph, data: BatchSizes, *, both: bool) -> int:
    """Return the bytes for a network, or `both` networks, that computes each node for all
    batches before the next one.
    """
    alive = alive_bytes(graph, data.size)
    stored = 0
    before = 0
    working = 0
    for node in graph.nodes:
        during, after = alive[node.name]
        if both:
            during += before
        stored = max(stored, during)
        before = after
        working = max(working, working_bytes(graph, node, data.size))
    return data.stored_bytes(stored) + working


def _algorithm_bytes(
    graph: Graph, layers: Collection[str], algorithms: Iterable[Algorithm], data: BatchSizes
) -> int:
    """Return the most bytes that one of the algorithms takes, which change these layers."""
    peak = 0
    for settings in algorithms:
        if settings.kind.matrices:
            peak = max(peak, _matrix_bytes(graph, layers, settings, data))
        if getattr(settings.settings, "guidance", 0):
            peak = max(peak, _backward_bytes(graph, data.size))
    return peak


def _matrix_bytes(
    graph: Graph, layers: Collection[str], settings: Algorithm, data: BatchSizes
) -> int:
    """Return the bytes for an algorithm with Gram matrices: the values of all batches that it
    stores, and the matrices and weights of a group of layers with one input.
    """
    # Few configs have algorithms
    from quantizer.layerwise.gram import DEEPEST

    groups: dict[str, list[Node]] = {}
    for name in layers:
        node = graph.by_name[name]
        if node.is_multiplying and _depth(graph, node) <= DEEPEST:
            source = next(node.refs())
            groups.setdefault(source, []).append(node)
    alive = alive_bytes(graph, data.size)
    solving = 0
    kept = 0
    last = 0
    for source, nodes in groups.items():
        solving = max(solving, 4 * _solving_values(graph, nodes, settings))
        _, after = alive[source]
        kept = max(kept, after)
        for node in nodes:
            last = max(last, graph.index[node.name])
    stored = data.stored_bytes(settings.kind.networks * kept)
    return stored + max(solving, pass_bytes(graph, data.size, last))


def _backward_bytes(graph: Graph, size: int) -> int:
    """Return the bytes for a backward pass of one batch: what operators read, all weights that
    are read from files, and the gradients of the last value. Layers keep no inputs, as the
    gradients of their weights are not computed.
    """
    total = 0
    values: set[str] = set()
    for node in graph.nodes:
        total += read_bytes(graph, node)
        if not node.params:
            values.update(node.refs())
    last = GRADIENTS * value_bytes(graph, graph.nodes[-1].name, size)
    return total + last + sum(value_bytes(graph, name, size) for name in values)


def _solving_values(graph: Graph, nodes: Sequence[Node], settings: Algorithm) -> int:
    """Return how many float32 values an algorithm needs for the weights of one group."""
    kind = settings.kind
    sizes = [graph.weight(node).numel() for node in nodes]
    matrix = max(_groups(node) * _depth(graph, node) ** 2 for node in nodes)
    matrices = kind.matrices * matrix
    if settings.stage != "round":
        return SEARCHED * max(sizes) + matrices
    # First the matrix is factored, then weights are rounded with what is left of it
    factoring = matrices + COPIES * sum(sizes)
    rounding = (1 + kind.networks) * matrix + IN_COLUMNS * sum(sizes)
    return max(factoring, rounding)


def _depth(graph: Graph, node: Node) -> int:
    """Return the inputs of each output channel of a layer."""
    weight = graph.weight(node)
    channels = weight.shape[0]
    if node.row.transposed:
        channels = weight.shape[1] * _groups(node)
    return weight.numel() // channels


def _groups(node: Node) -> int:
    return int(node.attrs.get("groups", 1))


def _with_holes(used: int) -> int:
    """Return how many bytes are resident for `used` bytes of a model with weights in files."""
    if keeps_freed_blocks():
        return int(HOLES * used)
    return used
