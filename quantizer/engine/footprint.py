"""How much memory a calibration or a test will take at its worst moment, on top of what is resident; and whether there
is as much. It counts what is large: weights, activations, Gram matrices. Measured, it is right within 20 %.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantizer import memory
from quantizer.algorithms.activation_store import half_of_what_is_free
from quantizer.algorithms.gram import DEEPEST
from quantizer.config.model import Config, QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.numerics.deferred import give_back
from quantizer.plan.model import Key, Plan
from quantizer.plan.size import alive_bytes, peak_activation_bytes

logger = logging.getLogger(__name__)

COPIES = 4
"""A weight has so many copies in float32 while it is rounded, compared or decoded; an algorithm that rounds columns has
twice as many."""
IN_STEP = 5
"""Two networks keep so many times the activations of one, with their differences and the kernels' own copies."""
SURE = 1.2
"""A run is refused only where a prediction that is too high by as much would not fit either."""


@dataclass(frozen=True)
class Data:
    """What activations depend on: how many `batches` there are, of what `size`, and their budget of memory."""

    size: int
    batches: int = 1
    budget: int | None = None


def calibration_bytes(plan: Plan, config: Config, data: Data, *, finetuned: bool = False) -> int:
    """What calibration adds to a process that has the model, its graph and its plan."""
    graph, algorithms = plan.graph, config.algorithms
    matrices = max((each.kind.matrices for each in algorithms), default=0)
    found = COPIES * (2 if matrices else 1) * _largest(graph, _rounded(plan))
    found += matrices * _matrix_bytes(graph, _rounded(plan))
    if plan.needs_data or finetuned or any(each.needs_data for each in algorithms):
        found += 2 * peak_activation_bytes(graph, data.size)
    if not graph.is_deferred:  # codes of one byte, and another float weight for each algorithm that changes it
        found += _values(graph, _rounded(plan)) * (1 + 4 * (len(algorithms) + finetuned))
    return found + _kept_bytes(plan, config, data, finetuned=finetuned)


def comparison_bytes(graph: Graph, specs: Mapping[Key, QuantizationSpec], size: int) -> int:
    """What test mode adds to a process that has the model and its graph: two networks in step."""
    rounded = {name for name, role in specs if is_parameter(role)}
    found = COPIES * _largest(graph, rounded) + IN_STEP * peak_activation_bytes(graph, size)
    if not graph.is_deferred:  # codes, and what they stand for
        found += 5 * _values(graph, rounded)
    return found


def peak_with(more: int) -> int | None:
    """The peak of this process if it takes so much on top of what is resident now; None where that is not known."""
    give_back()  # what is freed already
    now, before = memory.resident(), memory.peak()
    return None if now is None or before is None else max(before, now + more)


def require_room(mode: str, more: int, remedies: Sequence[str]) -> None:
    """Warn if there is not that much left; swap may help, and other processes may end.

    Raises:
        UsageError: the machine, or the control group of this process, does not have it at all.
    """
    peak, free, total = peak_with(more), memory.available(), memory.total()
    if peak is None or free is None or total is None or more <= free:
        return
    help_ = "; or ".join(remedies)
    if peak > SURE * total:
        text = f"{mode} would take about {memory.in_words(peak)} of memory, and there are {memory.in_words(total)}"
        raise UsageError(text, help=help_)
    text = f"{mode} takes about {memory.in_words(more)} more memory, and {memory.in_words(free)} are free: {help_}"
    logger.warning("%s", text)


def remedies(graph: Graph) -> list[str]:
    """What takes less memory."""
    from_folder = [] if graph.is_deferred else ["give a Hugging Face folder, whose weights stay in their files"]
    return ["use a smaller --batch_size", *from_folder]


def _rounded(plan: Plan) -> set[str]:
    """The layers with quantized parameters."""
    return {name for name, role in plan.tensors if is_parameter(role)}


def _values(graph: Graph, layers: Collection[str]) -> int:
    """How many numbers the parameters of these layers hold."""
    paths = {path for name in layers for path in graph.by_name[name].params.values()}
    return sum(graph.tensors[path].numel() for path in paths)


def _largest(graph: Graph, rounded: Collection[str]) -> int:
    """Bytes in float32 of the largest tensor that is rounded; of all, where each is read from a file."""
    paths = {path for name in rounded for path in graph.by_name[name].params.values()}
    read = graph.tensors if graph.is_deferred else paths
    return 4 * max((graph.tensors[path].numel() for path in read), default=0)


def _matrix_bytes(graph: Graph, layers: Iterable[str]) -> int:
    """Of a matrix of inputs x inputs of the deepest layer that is not too deep for one."""
    depths = [0]
    for node in (graph.by_name[name] for name in layers):
        if node.is_multiplying:
            weight = graph.weight(node)
            groups = int(node.attrs.get("groups", 1)) if node.row.transposed else 1
            depths.append(weight.numel() // (weight.shape[1] * groups if node.row.transposed else weight.shape[0]))
    return 4 * max(depth for depth in depths if depth <= DEEPEST) ** 2


def _kept_bytes(plan: Plan, config: Config, data: Data, *, finetuned: bool) -> int:
    """What is in memory of the values of all batches at once, up to its budget."""
    alive = alive_bytes(plan.graph, data.size)
    layers = [plan.graph.by_name[name] for name in _rounded(plan)]
    most = 0
    if finetuned or plan.corrected:  # node by node
        most = (1 + finetuned) * max((after for _, after in alive.values()), default=0)
    for each in config.algorithms:  # between the values that layers read
        if each.kind.matrices:
            between = (alive[name][1] for node in layers for name in node.refs())
            most = max(most, each.kind.networks * max(between, default=0))
    budget = half_of_what_is_free() if data.budget is None else data.budget
    return min(budget, data.batches * most)
