"""How much memory a calibration or a test will take at its worst moment, on top of what is
resident; and whether there is as much. It counts what is large: weights, activations, Gram
matrices.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantizer.algorithms.activation_store import half_of_what_is_free
from quantizer.algorithms.gram import DEEPEST
from quantizer.config.model import Algorithm, Config, QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.errors import OutOfMemoryError
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import Key, Plan
from quantizer.plan.size import alive_bytes, value_bytes, working_bytes
from quantizer.storage import process_memory
from quantizer.storage.allocator import give_back
from quantizer.storage.deferred_tensor import DeferredTensor

logger = logging.getLogger(__name__)

COPIES = 4
"""A weight has so many copies in its own dtype while it is rounded, compared or decoded."""
SEARCHED = 8
"""In float32, while scales of it are searched for, with what each leaves of it."""
IN_COLUMNS = 14
"""In float32, while it is rounded column by column: float, rounded, transposed and ordered,
with errors, the scale and the zero point of each value, and a second solution; of all layers
with one input together, which are solved as one.
"""
HOLES = 1.65
"""The heap of the C library, with the holes that values of different sizes leave in it within a
pass, is so many times as large as what is alive, but where large blocks are mapped. Measured on
images: 1.5 to 2.5.
"""
MAPPED = 32 << 20
"""Blocks from here on, as logits are, glibc always maps."""
PLANE = 2
"""Axes of the kernel of a convolution of images."""
SURE = 1.2
"""A run is refused only where a prediction that is too high by as much would not fit either."""


@dataclass(frozen=True)
class Data:
    """What activations depend on: how many `batches` there are, of what `size`, and their
    budget of memory.
    """

    size: int
    batches: int = 1
    budget: int | None = None


def calibration_bytes(
    plan: Plan, config: Config, data: Data, *, finetuned: bool = False
) -> int:
    """What calibration adds to a process that has the model, its graph and its plan: its
    hungriest step, and what the steps before it leave.
    """
    graph, algorithms, rounded = plan.graph, config.algorithms, _rounded(plan)
    steps = [_weights_bytes(graph, rounded)]
    if plan.needs_data or finetuned or any(each.needs_data for each in algorithms):
        steps.append(_reordered_bytes(graph) + _pass_bytes(graph, data))
    steps += [
        _algorithm_bytes(graph, rounded, each, data)
        for each in algorithms
        if each.kind.matrices
    ]
    if finetuned or plan.corrected:
        steps.append(_layer_by_layer_bytes(graph, data, both=finetuned))
    left = 0
    # Codes of one byte, and another float weight for each algorithm that changes it
    if not graph.is_deferred:
        left = _values(graph, rounded) * (1 + 4 * (len(algorithms) + finetuned))
    return left + max(steps)


def comparison_bytes(graph: Graph, specs: Mapping[Key, QuantizationSpec], size: int) -> int:
    """What test mode adds to a process that has the model and its graph: two networks in
    step.
    """
    rounded = {name for name, role in specs if is_parameter(role)}
    alive, most = alive_bytes(graph, size), 0
    for node in (each for each in graph.nodes if each.op != "input"):
        during, after = alive[node.name]
        step = after + during + working_bytes(graph, node, size) + _read_bytes(graph, node)
        value = value_bytes(graph, node.name, size)
        subtracted = 2 * after + 3 * value  # quantized, and subtracted from the float one
        most = max(most, _in_heap(graph, step, value, 2), _in_heap(graph, subtracted, value, 5))
    # Codes, and what they stand for
    left = 0 if graph.is_deferred else 5 * _values(graph, rounded)
    return left + max(_weights_bytes(graph, rounded), most)


class Base(NamedTuple):
    """What a process has `resident`, and the most that it ever had; None where the system does
    not say.
    """

    resident: int | None
    peak: int | None

    @staticmethod
    def now() -> "Base":
        """Those of this process."""
        give_back()  # what is freed already
        return Base(process_memory.resident(), process_memory.peak())


def peak_with(more: int, base: Base | None = None) -> int | None:
    """The peak of this process, or of the one that had `base`, if it takes so much on top of
    what is resident now; None where that is not known.
    """
    now, before = base or Base.now()
    return None if now is None or before is None else max(before, now + more)


def require_room(mode: str, more: int, remedies: Sequence[str]) -> None:
    """Warn if there is not that much left; swap may help, and other processes may end.

    Raises:
        OutOfMemoryError: the machine, or the control group of this process, does not have it at
            all.
    """
    peak, free, total = peak_with(more), process_memory.available(), process_memory.total()
    if peak is None or free is None or total is None or more <= free:
        return
    help_ = "; or ".join(remedies)
    if peak > SURE * total:
        text = (
            f"{mode} would take about {process_memory.in_words(peak)} of memory, and there are "
            f"{process_memory.in_words(total)}"
        )
        raise OutOfMemoryError(text, help=help_)
    text = (
        f"{mode} takes about {process_memory.in_words(more)} more memory, and "
        f"{process_memory.in_words(free)} are free: {help_}"
    )
    logger.warning("%s", text)


def remedies(graph: Graph) -> list[str]:
    """What takes less memory."""
    from_folder = (
        []
        if graph.is_deferred
        else ["give a Hugging Face folder, whose weights stay in their files"]
    )
    return ["use a smaller --batch_size", *from_folder]


def _rounded(plan: Plan) -> set[str]:
    """The layers with quantized parameters."""
    return {name for name, role in plan.tensors if is_parameter(role)}


def _values(graph: Graph, layers: Collection[str]) -> int:
    """How many numbers the parameters of these layers hold."""
    paths = {path for name in layers for path in graph.by_name[name].params.values()}
    return sum(graph.tensors[path].numel() for path in paths)


def _weights_bytes(graph: Graph, rounded: Collection[str]) -> int:
    """Of the largest weight while it is rounded, and of the largest that is only read from its
    file.
    """
    paths = [path for name in rounded for path in graph.by_name[name].params.values()]
    found = COPIES * max((graph.tensors[path].nbytes for path in paths), default=0)
    return max(
        [
            found,
            *(
                each.nbytes
                for each in graph.tensors.values()
                if isinstance(each, DeferredTensor)
            ),
        ]
    )


def _reordered_bytes(graph: Graph) -> int:
    """Of the weights that `weights_last` copies."""
    layers = [
        node for node in graph.nodes if node.row.spatial == PLANE and not node.row.transposed
    ]
    weights = [
        graph.weight(node)
        for node in layers
        if "weight" in node.params and not graph.is_deferred
    ]
    return sum(each.nbytes for each in weights if each.shape[2:].numel() > 1)


def _pass_bytes(graph: Graph, data: Data, upto: int | None = None) -> int:
    """Of one pass, before the node of index `upto` if not to its end."""
    alive, most = alive_bytes(graph, data.size), 0
    for node in graph.nodes[:upto]:
        beside = working_bytes(graph, node, data.size) + _read_bytes(graph, node)
        value = value_bytes(graph, node.name, data.size)
        most = max(most, _in_heap(graph, alive[node.name][0] + beside, value))
    return most


def _algorithm_bytes(
    graph: Graph, rounded: Collection[str], algorithm: Algorithm, data: Data
) -> int:
    """Of one that sums up Gram matrices: what it keeps of all batches, and the matrices and
    weights of a group.
    """
    groups: dict[str, list[Node]] = {}
    for node in (graph.by_name[name] for name in rounded):
        if node.is_multiplying and _depth(graph, node) <= DEEPEST:
            groups.setdefault(next(node.refs()), []).append(node)
    solving, kept, alive = 0, 0, alive_bytes(graph, data.size)
    for source, nodes in groups.items():
        sizes = [graph.weight(node).numel() for node in nodes]
        matrix = max(_groups(node) * _depth(graph, node) ** 2 for node in nodes)
        kind, searched = algorithm.kind, SEARCHED * max(sizes)
        # First the matrix is factored, then weights are rounded with what is left of it
        if algorithm.stage == "round":
            factored = kind.matrices * matrix + COPIES * sum(sizes)
            searched = max(factored, (1 + kind.networks) * matrix + IN_COLUMNS * sum(sizes))
        else:
            searched += kind.matrices * matrix
        solving = max(solving, 4 * searched)
        kept = max(kept, alive[source][1])
    last = max(
        (graph.index[node.name] for nodes in groups.values() for node in nodes), default=0
    )
    return _within(data, algorithm.kind.networks * kept) + max(
        solving, _pass_bytes(graph, data, last)
    )


def _layer_by_layer_bytes(graph: Graph, data: Data, *, both: bool) -> int:
    """Of a network that computes a node for all batches before the next one, or of both
    networks so.
    """
    alive, most, before = alive_bytes(graph, data.size), 0, 0
    for node in graph.nodes:
        during, after = alive[node.name]
        most, before = max(most, during + (before if both else 0)), after
    return _within(data, most) + max(
        (working_bytes(graph, node, data.size) for node in graph.nodes), default=0
    )


def _within(data: Data, kept: int) -> int:
    """What is in memory of values of all batches, up to their budget."""
    budget = half_of_what_is_free() if data.budget is None else data.budget
    return min(budget, data.batches * kept)


def _depth(graph: Graph, node: Node) -> int:
    """Inputs of an output channel of a layer."""
    weight = graph.weight(node)
    return weight.numel() // (
        weight.shape[1] * _groups(node) if node.row.transposed else weight.shape[0]
    )


def _groups(node: Node) -> int:
    return int(node.attrs.get("groups", 1))


def _read_bytes(graph: Graph, node: Node) -> int:
    """Of the parameters that are read from files for this node."""
    tensors = (graph.tensors[path] for path in node.params.values())
    return sum(each.nbytes for each in tensors if isinstance(each, DeferredTensor))


def _in_heap(graph: Graph, alive: int, value: int, copies: int = 1) -> int:
    """What is resident for so many bytes alive, among them copies of a value of so many
    bytes.
    """
    mapped = alive if graph.is_deferred else copies * value if value >= MAPPED else 0
    return mapped + int(HOLES * (alive - mapped))
