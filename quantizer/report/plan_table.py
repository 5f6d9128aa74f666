"""Makes the table of a plan, and counts its formats: for `quantizer plan`, and the plan and the
result in Python.
"""

from collections import Counter

from quantizer.config.roles import base_role
from quantizer.config.wording import first_names
from quantizer.plan.model import Plan
from quantizer.report.tables import describe_spec, why_float
from quantizer.report.view import Listing, TableRow, TableView


def plan_table(plan: Plan, view: TableView) -> Listing:
    """Return each tensor's spec, or why it stays float, in execution order."""
    reasons = [(key, f"as {place} says") for key, place in plan.off.items()]
    reasons += plan.ungrouped.items()
    rows_in_float: dict[str, list[TableRow]] = {}
    for (layer, role), reason in reasons:
        row = (layer, role, f"float: {reason}")
        rows_in_float.setdefault(layer, []).append(row)
    rows: list[TableRow] = []
    ranks: list[float | None] = []
    for node in plan.graph.nodes:
        for role, tensor in plan.of_layer(node.name).items():
            rows.append((node.name, role, describe_spec(tensor.spec)))
        rows += rows_in_float.get(node.name, [])
        ranks += [0.0] * (len(rows) - len(ranks))
        if node.name in plan.floats and node.row.kind != "structural":
            rows.append((node.name, "activation", why_float(plan.floats[node.name])))
            ranks.append(None)
    titles = ("layer", "tensor", "spec")
    return view.listing(titles, rows, ranks, what="tensor", idle="in float")


def format_counts(plan: Plan) -> str:
    """Return how many tensors of each role have each number format, as a sentence's part.

    Example: "15 activation uint8, 10 weights int8, 10 bias int32, 1 input uint8".
    """
    counts: Counter[tuple[str, str]] = Counter()
    for (_, role), tensor in plan.tensors.items():
        number_format = describe_spec(tensor.spec).partition(" ")[0]
        counts[base_role(role), number_format] += 1
    return first_names([f"{count} {' '.join(words)}" for words, count in counts.most_common()])
