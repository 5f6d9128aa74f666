"""Tables about the DPU: its integers against the simulation, and what it can run. Text in, rich renderables out."""

from __future__ import annotations

from quantizer.engine.exact import ExactComparison
from quantizer.report.tables import Listing


def exact_table(found: ExactComparison) -> Listing:
    """One line per tensor with codes, in execution order."""
    rows = [
        (row.layer, row.role, str(row.position), str(row.codes), str(row.differing), str(row.most_steps))
        for row in found.layers
    ]
    titles = ("layer", "tensor", "position", "codes", "differing", "at most steps")
    return Listing(titles, rows, frozenset(titles[2:]))
