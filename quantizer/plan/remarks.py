"""What the user should hear of a plan: what passes changed, and which operators stay float."""

from collections import Counter
from collections.abc import Iterable, Iterator

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import shortened
from quantizer.graph.ir import Graph, readers
from quantizer.graph.passes import summary
from quantizer.plan.model import Plan
from quantizer.plan.resolve import NO_RULES


def remarks(plan: Plan) -> Iterator[str]:
    """A sentence each."""
    yield from summary(plan.graph)
    for length in plan.graph.lengths:
        inputs = ", ".join(f"axis {axis} of input_{index}" for index, axis in length.axes)
        yield (
            f"{length.name}: any size of {length} ({inputs}); shapes and figures are those of "
            "the first batch"
        )
    waiting = [join.name for join in plan.joins if not join.is_single]
    if waiting:
        text = "calibration decides whether what they join shares a scale or keeps its own"
        yield f"{text}: {shortened(waiting, 3)}"
    if not plan.tensors:
        yield "warning: nothing is quantized: the config leaves all of the network float"
    elif (found := left_parameters(plan))[0] > MUCH:
        yield f"warning: {share_left(found[0])}, the largest is {found[1]}"
    yield from ungrouped(plan)
    yield from left_float(
        node.op for node in plan.graph.nodes if plan.floats.get(node.name) == NO_RULES
    )


MUCH = 0.2
"""A share of the parameters in float that nobody wants without knowing."""


def share_left(share: float) -> str:
    """A sentence on the share of a model's parameters that stay float.

    >>> share_left(0.001)
    '0.1% of the parameters stay float'
    """
    return f"{share:.1%} of the parameters stay float"


def left_parameters(plan: Plan) -> tuple[float, str]:
    """The share of the parameters' values that no tensor of the plan covers, and the path of
    the largest such one.
    """
    own = [
        node for node in plan.graph.nodes if node.op != "constant" and node.row.kind != "float"
    ]  # no inserted factors
    used = {path: node for node in own for path in node.params.values()}
    sizes = {
        path: plan.graph.tensors[path].numel()
        for path in used
        if plan.graph.tensors[path].is_floating_point()
    }
    names = [
        (plan.graph.by_name[layer], parameter_name(role))
        for layer, role in plan.tensors
        if is_parameter(role)
    ]
    covered = {node.params[name] for node, name in names}
    left = {path: size for path, size in sizes.items() if path not in covered}
    largest = max(left, key=left.__getitem__, default="")
    return sum(left.values()) / (sum(sizes.values()) or 1), largest


def behind_norms(graph: Graph) -> list[str]:
    """Linear layers that read what a normalization over channels makes, as those of
    transformers do.
    """
    norms = [node.name for node in graph.nodes if node.row.normalizes]
    reading = {name for norm in norms for name, _ in readers(graph, norm) if name}
    return [node.name for node in graph.nodes if node.name in reading and node.row.spatial == 0]


def ungrouped(plan: Plan) -> Iterator[str]:
    """One sentence for each size that groups do not fit, where that is no error."""
    for why in dict.fromkeys(plan.ungrouped.values()):
        names = [
            f"{role} of {layer}"
            for (layer, role), each in plan.ungrouped.items()
            if each == why
        ]
        yield f"left float, as {why}: {shortened(names)}"


def left_float(kinds: Iterable[str]) -> Iterator[str]:
    """One sentence on operators or modules without quantization rules; none if there are none
    of these.
    """
    names = ", ".join(f"{name} ({count})" for name, count in sorted(Counter(kinds).items()))
    if names:
        yield f"left float, as there are no quantization rules for them: {names}"
