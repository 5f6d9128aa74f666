"""Make the table, the lines and the JSON of a climb: what each step gained and cost."""

import math
from collections.abc import Iterator, Sequence

from quantizer.config.json_types import JsonObject
from quantizer.evaluation.ladder.climb import KEPT, NOT_TRIED, Climb, Row
from quantizer.report.tables import finite_row, number_text
from quantizer.report.view import Listing

_MAX_REASON = 150
"""Characters of a reason; tune.json has all of it."""


def ladder_table(climb: Climb, metrics: Sequence[str]) -> Listing:
    """Return a table with a row for each step that was measured.

    Args:
        climb: of the ladder.
        metrics: those of the gates.
    """
    columns = list(dict.fromkeys((*metrics, "sqnr_db")))
    lines = []
    for row in climb.rows:
        if row.judged is None:
            continue
        figures = []
        for metric in columns:
            value = row.judged.metrics.get(metric)
            figures.append(number_text(value, ".5g"))
        megabytes = f"{row.judged.weight_bytes / 1e6:.3f}"
        cost = (megabytes, str(row.tests), f"{row.seconds:.1f}")
        lines.append((row.step, *figures, *cost, row.result))
    titles = ("step", *columns, "MB", "tests", "s", "result")
    layouts = (titles, ("step", *columns, "MB", "s", "result"), ("step", *columns, "result"))
    return Listing(titles, lines, frozenset(titles[1:-1]), layouts)


def result_lines(climb: Climb, data: str, config: str) -> Iterator[str]:
    """Yield lines about what was changed, what was not tried and why, and the time.

    Args:
        climb: of the ladder.
        data: a sentence on the data; empty if there is nothing to say.
        config: the path of the written config.
    """
    if climb.judged.is_met and not climb.changes:
        yield "all gates hold with the config as it is"
    for gate in climb.judged.missed_by_float:
        yield f"{NOT_TRIED}: any change: the float network does not meet {gate} either"
    for change in climb.changes:
        yield f"{KEPT}: {change}"
    for reason, steps in _not_tried(climb.rows).items():
        yield f"{NOT_TRIED}: {', '.join(steps)}: {reason}"
    if data:
        yield f"data: {data}"
    yield f"config: {config}"
    if climb.rung.fast_finetune is not None:
        yield f"calibrate with --fast_finetune {climb.rung.fast_finetune}, too: it is an option"


def _not_tried(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the steps that were not tried, by their reason."""
    steps_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.result != NOT_TRIED:
            continue
        reason = "; ".join(row.reasons)
        if len(reason) > _MAX_REASON:
            reason = f"{reason[:_MAX_REASON]}…"
        steps_by_reason.setdefault(reason, []).append(row.step)
    return steps_by_reason


def climb_json(climb: Climb, gates: Sequence[str]) -> JsonObject:
    """Return a climb for programs."""
    return {
        "gates": list(gates),
        "met": climb.judged.is_met,
        "missed_by_float": list(climb.judged.missed_by_float),
        "out_of_time": climb.is_out_of_time,
        "changes": climb.changes,
        "fast_finetune": climb.rung.fast_finetune,
        "steps": [_row_json(row) for row in climb.rows],
    }


def _row_json(row: Row) -> JsonObject:
    content: JsonObject = {
        "step": row.step,
        "cost": row.cost,
        "result": row.result,
        "change": row.change,
        "reasons": list(row.reasons),
        "tests": row.tests,
        "seconds": round(row.seconds, 2),
    }
    if row.judged is not None:
        shortfall = math.fsum(row.judged.shortfalls)
        figures = {"weight_bytes": row.judged.weight_bytes, "shortfall": shortfall}
        content |= finite_row(figures)
        content["metrics"] = finite_row(row.judged.metrics)
    return content
