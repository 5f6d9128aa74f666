"""Write the tables in docs/family_results.md from the results of `make engines`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The program that writes the results is not part of the package.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from engines.families.consumers import CONSUMERS, Consumer
from engines.families.models import FAMILIES
from engines.families.schemes import SCHEMES

RESULTS = Path(__file__).parents[1] / "benchmarks" / "engines" / "families" / "results"
EQUAL_DB = 100.0
"""From here on, outputs differ by the order of sums in float32 only."""
_FAMILY = re.compile(r"this model is \w+, which")
Rows = dict[tuple[str, str], dict[str, Any]]


def tables_of_families() -> str:
    """Return a table for each consumer."""
    return "".join(_table(consumer) for consumer in CONSUMERS.values())


def stored_rows(consumer: Consumer) -> Rows:
    """Return the rows of a consumer by family and scheme."""
    content = json.loads((RESULTS / f"{consumer.name}.json").read_text("utf-8"))
    return {(row["family"], row["scheme"]): row for row in content["rows"]}


def _table(consumer: Consumer) -> str:
    rows = stored_rows(consumer)
    schemes = (*consumer.schemes, *consumer.for_llama)
    reasons: dict[str, str] = {}
    lines = [_line(["family", *(SCHEMES[name].title for name in schemes)])]
    lines.append("|---" * (len(schemes) + 1) + "|\n")
    for family in FAMILIES:
        if not consumer.schemes_of(family):
            continue
        cells = [_cell(rows.get((family, name)), reasons) for name in schemes]
        lines.append(_line([FAMILIES[family].title, *cells]))
    versions = {row["version"] for row in rows.values() if "version" in row}
    dates = {row["date"] for row in rows.values()}
    heading = f"\n**{consumer.title} {', '.join(sorted(versions))}**, {max(dates)}:\n\n"
    notes = [f"* {number}: {reason}.\n" for reason, number in reasons.items()]
    return "".join([heading, *lines, "\n", *notes])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(row: dict[str, Any] | None, reasons: dict[str, str]) -> str:
    """Return how close an engine is and the size of the file, or the number of the reason why
    it was not run.
    """
    if row is None:
        return ""
    reason = row.get("refusal", row.get("failure", ""))
    if reason:
        reasons.setdefault(_sentence(reason), str(len(reasons) + 1))
        word = "no" if "failure" in row else "refused"
        return f"{word} ({reasons[_sentence(reason)]})"
    figure = row.get("sqnr_db", EQUAL_DB)
    words = ["equal" if figure >= EQUAL_DB else f"{figure:.0f} dB"]
    if row.get("unread"):
        words = ["not read"]
    if "of" in row:
        words.append(f"{row['tokens']} of {row['of']}")
    if row.get("dequantized"):
        words.append("dequantized")
    if "share" in row:
        words.append(f"{row['share']:.0%}")
    return ", ".join(words)


def _sentence(reason: str) -> str:
    """Return a reason without what differs from family to family."""
    return _FAMILY.sub("this family", reason).rstrip(".")
