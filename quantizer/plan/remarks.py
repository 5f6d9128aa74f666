"""Sentences about a plan for the user: what passes changed, and what stays float."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import counted, first_names
from quantizer.graph.ir import Graph
from quantizer.graph.passes import summary
from quantizer.graph.tracing.batch_axes import fixed_batch
from quantizer.plan.model import Plan
from quantizer.plan.resolve import NO_RULES

MUCH = 0.2
"""A share of the parameters in float that is most likely a mistake."""


def plan_remarks(plan: Plan) -> Iterator[str]:
    """Yield sentences about what passes changed and what stays float."""
    yield from summary(plan.graph)
    for length in plan.graph.lengths:
        inputs = ", ".join(f"axis {axis} of input_{index}" for index, axis in length.axes)
        yield (
            f"{length.name}: any size of {length} ({inputs}); shapes and figures are those of "
            "the first batch"
        )
    yield from size_remarks(plan.graph)
    waiting = [join.name for join in plan.joins if not join.is_single]
    if waiting:
        text = "calibration decides whether what they join shares a scale or keeps its own"
        yield f"{text}: {first_names(waiting, 3)}"
    named: set[str] = set()
    for rule in plan.rules:
        if rule.leaves_float:
            named.update(rule.layers)
    share, largest = left_parameters(plan, besides=named)
    if not plan.tensors:
        yield "warning: nothing is quantized: the config leaves all of the network float"
    elif share > MUCH:
        yield f"warning: {share_left(share)}, the largest is {largest}"
    yield from group_size_remarks(plan)
    without_rules = []
    for node in plan.graph.nodes:
        if plan.floats.get(node.name) == NO_RULES:
            without_rules.append(node.op)
    yield from left_float(without_rules)


def size_remarks(graph: Graph) -> list[str]:
    """Return a sentence on the number of samples, if the model fixes it."""
    samples = fixed_batch(graph)
    if samples is None:
        return []
    return [f"only batches of {counted(samples, 'sample')} can run"]


def share_left(share: float) -> str:
    """Return a sentence on the share of a model's parameters that stay float.

    >>> share_left(0.001)
    '0.1% of the parameters stay float'
    """
    return f"{share:.1%} of the parameters stay float"


def left_parameters(plan: Plan, besides: Container[str] = ()) -> tuple[float, str]:
    """Return the share of the parameters' values that stay float, and the path of the largest
    such parameter. Layers in `besides` do not count.
    """
    graph = plan.graph
    quantized: set[str] = set()
    for layer, role in plan.tensors:
        if is_parameter(role):
            params = graph.by_name[layer].params
            quantized.add(params[parameter_name(role)])
    total = 0
    left: dict[str, int] = {}
    seen: set[str] = set()
    for node in graph.nodes:
        # Inserted factors are no parameters of the model
        if node.op == "constant" or node.row.kind == "float":
            continue
        for path in node.params.values():
            value = graph.tensors[path]
            if path in seen or not value.is_floating_point():
                continue
            seen.add(path)
            total += value.numel()
            if path not in quantized and node.name not in besides:
                left[path] = value.numel()
    largest = max(left, key=left.__getitem__, default="")
    share = sum(left.values()) / (total or 1)
    return share, largest


def group_size_remarks(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each size that groups do not fit, if that is not an error."""
    names: dict[str, list[str]] = {}
    for (layer, role), reason in plan.ungrouped.items():
        names.setdefault(reason, []).append(f"{role} of {layer}")
    for reason, tensors in names.items():
        yield f"left float, as {reason}: {first_names(tensors)}"


def left_float(kinds: Iterable[str]) -> Iterator[str]:
    """Yield one sentence on operators or modules without quantization rules, if there are
    any.
    """
    counts = sorted(Counter(kinds).items())
    if counts:
        names = ", ".join(f"{name} ({count})" for name, count in counts)
        yield f"left float, because there are no quantization rules for them: {names}"
