"""What the user should hear of a plan: what passes changed, and which operators stay float."""

from collections import Counter
from collections.abc import Iterable, Iterator

from quantizer.graph.passes import summary
from quantizer.plan.model import Plan
from quantizer.plan.resolve import NO_RULES


def remarks(plan: Plan) -> Iterator[str]:
    """A sentence each."""
    yield from summary(plan.graph)
    for length in plan.graph.lengths:
        inputs = ", ".join(f"axis {axis} of input_{index}" for index, axis in length.axes)
        yield f"{length.name}: any size of {length} ({inputs}); shapes and figures are those of the first batch"
    yield from left_float(node.op for node in plan.graph.nodes if plan.floats.get(node.name) == NO_RULES)


def left_float(kinds: Iterable[str]) -> Iterator[str]:
    """One sentence on operators or modules without quantization rules; none if there are none of these."""
    names = ", ".join(f"{name} ({count})" for name, count in sorted(Counter(kinds).items()))
    if names:
        yield f"left float, as there are no quantization rules for them: {names}"
