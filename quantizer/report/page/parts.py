"""What sections of the page have in common: names, tables, folded parts. None of them draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quantizer.report.page.html import Child, Markup, element

Json = dict[str, Any]
WEAK_DB, POOR_DB = 25.0, 15.0
"""Below these a tensor's own quantization is worth a look, or harmful."""


def plain(value: Any) -> str:
    """Any value of JSON in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {plain(each)}" for name, each in value.items())
    return ", ".join(map(plain, value)) if isinstance(value, list) else str(value)


def name_of(content: Json, layer: str) -> str:
    """What people call a layer: its module's path."""
    return str(content["paths"].get(layer, layer))


def of(content: Json, row: Json) -> str:
    """A tensor and its layer."""
    return f"{row['tensor']} of {name_of(content, row['layer'])}"


def searched(content: Json, row: Json) -> str:
    """What the filter looks through."""
    return f"{name_of(content, row['layer'])} {row['layer']} {row['tensor']}"


def summary_of(content: Json, row: Json, facts: str) -> Markup:
    """What a folded tensor shows of itself."""
    name = element("span", name_of(content, row["layer"]), title=row["layer"])
    return element("summary", name, " ", element("small", f"{row['tensor']}; {facts}"))


def most_damaged(rows: Sequence[Json]) -> Json | None:
    """The tensor with the lowest local SQNR, once one was measured."""
    measured = [row for row in rows if row["local_sqnr_db"] is not None]
    return min(measured, key=lambda row: row["local_sqnr_db"], default=None)


def weakest_output(rows: Sequence[Json]) -> Json | None:
    """Return the output or part with the lowest SQNR, once one was measured."""
    measured = [row for row in rows if row["sqnr_db"] is not None]
    return min(measured, key=lambda row: row["sqnr_db"], default=None)


def in_order(content: Json) -> list[Json]:
    """The tensors in the order of execution."""
    return sorted(content["layers"], key=lambda row: row["order"])


def severity(row: Json) -> str | None:
    """The class of a tensor's row."""
    ratio = row["local_sqnr_db"]
    if ratio is None:
        return None
    return "bad" if ratio < POOR_DB else "warn" if ratio < WEAK_DB else None


def link(content: Json, row: Json) -> Child:
    """The layer's name, leading to the line of the config that says most about it."""
    href = f"#line-{row['line']}" if row["line"] is not None and content["config"] else None
    return element(
        "a" if href else "span", name_of(content, row["layer"]), href=href, title=row["layer"]
    )


def number_cell(value: float | None, form: str) -> Markup:
    """A cell that is sorted by its value; empty where there is none."""
    return element(
        "td",
        "" if value is None else form.format(value),
        class_="number",
        data_value="" if value is None else value,
    )


def table(
    titles: Sequence[str],
    rows: Iterable[Markup],
    numbers: Sequence[str] = (),
    *,
    is_sortable: bool = True,
) -> Markup:
    """A table that scrolls sideways; the script sorts its rows by a column if `is_sortable`."""
    heads = [
        element("th", title, scope="col", class_="number" if title in numbers else None)
        for title in titles
    ]
    table = element(
        "table",
        element("thead", element("tr", heads)) if any(titles) else None,
        element("tbody", rows),
        class_="sortable" if is_sortable else None,
    )
    return element("div", table, class_="scroll")


def filter_input(section: str) -> Markup:
    """What shows a section's layers by name, for the script."""
    return element(
        "input",
        class_="filter",
        type="search",
        placeholder="show layers whose name contains …",
        hidden=True,
        aria_label="Filter by layer",
        data_of=section,
    )


def folded(texts: Sequence[str], what: str) -> Markup:
    """A folded list below how many it has; a line where there are none."""
    if not texts:
        return element("p", f"No {what}.")
    return element(
        "details",
        element("summary", f"{len(texts)} {what}"),
        element("ul", [element("li", t) for t in texts]),
    )
