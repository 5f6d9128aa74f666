"""What two calibrations, or two plans, of one model have that differs, tensor by tensor. Reads;
runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.comparison.output_figures import POOLED_FIGURE, ROWS_KEPT
from quantizer.evaluation.scores import DROP, RATIO
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.report.tables import finite
from quantizer.report.view import Listing, View
from quantizer.results.folder import REPORT, read_info
from quantizer.sources.directions import BY_NAME, Directions

Json = dict[str, Any]
Key = tuple[str, str]
SQNR = ("local_sqnr_db", "accumulated_sqnr_db")
TOLERANCE = 1e-3
"""By so little, relative to the first, figures may differ from machine to machine."""


@dataclass(frozen=True)
class Side:
    """One of the two: its tensors, each a spec as JSON and what is known of it besides, and its
    figures by name.

    `metrics` are the names of those that `evaluate` gives; `directions` says which way they are
    good, as far as that is declared.
    """

    model: str
    tensors: Mapping[Key, Json]
    figures: Mapping[str, float | None]
    paths: Mapping[str, str]
    metrics: frozenset[str] = frozenset()
    directions: Directions = BY_NAME


@dataclass(frozen=True)
class Difference:
    """The tensors and the figures that differ, each with both values; None where one side has
    none.

    `worse` are the figures by which the second loses, `unknown` those of which nothing says
    whether less is better.
    """

    rows: list[Json]
    figures: Mapping[str, tuple[float | None, float | None]]
    worse: tuple[str, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> Json:
        """For programs; infinite figures as null."""
        figures = {
            name: (finite(before), finite(after))
            for name, (before, after) in self.figures.items()
        }
        return {
            "tensors": self.rows,
            "figures": figures,
            "worse": list(self.worse),
            "unknown": list(self.unknown),
        }


def of_folder(place: Path) -> Side:
    """A result folder; with SQNRs if it was tested.

    Raises:
        ResultError: it is incomplete, or was changed.
    """
    opened = read_info(place)
    plan, tested = opened.plan, opened.about(REPORT)
    measured = {(row["layer"], row["tensor"]): row for row in tested.get("layers", ())}
    tensors = {
        (layer, role): {
            "spec": entry["spec"],
            "scale": entry.get("scale"),
            "zero_point": entry.get("zero_point"),
        }
        | {name: measured.get((layer, role), {}).get(name) for name in SQNR}
        for layer, roles in opened.entries.items()
        for role, entry in roles.items()
    }
    figures = _figures(tested) | {"weight_bytes": plan["weight_bytes"]["quantized"]}
    return Side(
        opened.header["model"],
        tensors,
        figures,
        plan["paths"],
        frozenset(tested.get("pairs", {})),
        Directions.of_declared(tested.get("lower_is_better", {})),
    )


def _figures(tested: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a test, and where there are several outputs or parts those of
    each.
    """
    figures: dict[str, float | None] = dict(tested.get("metrics", {}))
    outputs = tested.get("outputs", [])
    if "sqnr_db" in figures and figures["sqnr_db"] is None:
        ratios = [ratio for ratio in map(_sqnr_of, outputs) if ratio is not None]
        figures["sqnr_db"] = min(ratios, default=None)
    if len(outputs) < 2:
        figures.pop(POOLED_FIGURE, None)  # of a single part it says nothing more
        return figures
    if POOLED_FIGURE in figures and figures[POOLED_FIGURE] is None:
        figures[POOLED_FIGURE] = figures["sqnr_db"]
    for row in outputs:
        for figure, value in _figures_of(row):
            figures[f"{figure}[{row['name']}]"] = value
    return figures


def _figures_of(row: Json) -> Iterator[tuple[str, float | None]]:
    """Yield the figures of one output or part; of floats equal values are no quality."""
    if row["kind"] == "float":
        yield "sqnr_db", _sqnr_of(row)
        yield "cosine", row["cosine"]
    elif row["kind"] != "empty":
        yield "equal_outputs", row["equal"]
    order = row.get("rows")
    if order is not None and order["rows"]:
        yield ROWS_KEPT, 1 - order["exchanged"] / order["rows"]


def _sqnr_of(row: Json) -> float | None:
    """Return the SQNR of an output or part; None if it has none. Where it is infinite, files
    have null.
    """
    ratio: float | None = row["sqnr_db"]
    if ratio is not None or row["kind"] != "float":
        return ratio
    return math.inf if row["equal"] == 1 else -math.inf


def of_plan(plan: Plan, paths: Mapping[str, str]) -> Side:
    """What a config does to a model, whose layers have these module paths."""
    tensors = {key: {"spec": tensor.spec.to_json()} for key, tensor in plan.tensors.items()}
    return Side(plan.graph.model, tensors, {"weight_bytes": weight_bytes(plan)[1]}, paths)


def difference(first: Side, second: Side) -> Difference:
    """What differs, in the order of the first; `worse` are the figures by which the second
    loses.
    """
    keys = [*first.tensors, *(key for key in second.tensors if key not in first.tensors)]
    rows = [
        row
        for key in keys
        if (row := _row(key, first.tensors.get(key), second.tensors.get(key)))
    ]
    names = [*first.figures, *(name for name in second.figures if name not in first.figures)]
    figures = {name: (first.figures.get(name), second.figures.get(name)) for name in names}
    differing = {name: pair for name, pair in figures.items() if pair[0] != pair[1]}
    metrics = first.metrics | second.metrics
    directions = second.directions.beside(first.directions)
    worse: list[str] = []
    unknown: list[str] = []
    for name, (before, after) in differing.items():
        if _follows(name, metrics):
            continue
        is_lower_better = directions.of_figure(name, metrics)
        if is_lower_better is None:
            unknown.append(name)
        elif _is_worse(before, after, is_lower_better=is_lower_better):
            worse.append(name)
    return Difference(rows, differing, tuple(worse), tuple(unknown))


def _follows(name: str, metrics: Collection[str]) -> bool:
    """Whether a figure is made of a metric, which is compared itself, and of the float
    model's.
    """
    ends = ("_float", DROP, RATIO)
    return any(name.endswith(end) and name.removesuffix(end) in metrics for end in ends)


def _row(key: Key, before: Json | None, after: Json | None) -> Json | None:
    row: Json = {"layer": key[0], "tensor": key[1]}
    if before is None or after is None:
        return row | {"only_in": "second" if before is None else "first"}
    specs = {
        name: [before["spec"].get(name), after["spec"].get(name)]
        for name in after["spec"]
        if before["spec"].get(name) != after["spec"].get(name)
    }
    values = {
        name: [before.get(name), after.get(name)]
        for name in ("scale", "zero_point", *SQNR)
        if before.get(name) != after.get(name)
    }
    return row | {"spec": specs} | values if specs or values else None


def _is_worse(before: float | None, after: float | None, *, is_lower_better: bool) -> bool:
    """Whether a figure says that the second is worse; no figure where there was one is worse,
    too.
    """
    if before is None or before == -math.inf:
        return False
    if after is None:
        return True
    loss = after - before if is_lower_better else before - after
    return loss == math.inf or loss > TOLERANCE * abs(before)


def difference_table(found: Difference, view: View) -> Listing:
    """The tensors that differ; those whose SQNR fell most are the first to show."""
    titles = ("layer", "tensor", "changed", "scale ratio", "local dB", "accumulated dB")
    texts = [
        (
            row["layer"],
            row["tensor"],
            ", ".join(_words(row)),
            _ratio(row.get("scale")),
            *(_pair(row.get(n)) for n in SQNR),
        )
        for row in found.rows
    ]
    return view.listing(
        titles, texts, [_fall(row) for row in found.rows], numbers=titles[3:], what="tensor"
    )


def _words(row: Json) -> Iterator[str]:
    if "only_in" in row:
        yield f"only in the {row['only_in']}"
    for name, (before, after) in row.get("spec", {}).items():
        yield f"{name} {before} → {after}"


def _fall(row: Json) -> float:
    """The change of the accumulated SQNR; what has none comes after what fell."""
    before, after = row.get(SQNR[1], (None, None))
    return 0.0 if before is None or after is None else after - before


def _pair(pair: list[float | None] | None) -> str:
    return (
        ""
        if pair is None
        else " → ".join("" if value is None else f"{value:.2f}" for value in pair)
    )


def _ratio(pair: list[Any] | None) -> str:
    """How much larger scales became: of several the least and the most."""
    if pair is None:
        return ""
    before, after = (value if isinstance(value, list) else [value] for value in pair)
    if len(before) != len(after) or not all(
        isinstance(value, (int, float)) and value for value in (*before, *after)
    ):
        return "other scales"
    ratios = [y / x for x, y in zip(before, after, strict=True)]
    least, most = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
    return least if least == most else f"{least} … {most}"


def figure_lines(found: Difference) -> Iterator[str]:
    """One line for each figure."""
    for name, (before, after) in found.figures.items():
        texts = ["none" if value is None else f"{value:.6g}" for value in (before, after)]
        remark = ""
        if name in found.worse:
            remark = ", worse"
        elif name in found.unknown:
            remark = ", not judged: whether less or more is better is not known"
        yield f"{name} {' → '.join(texts)}{remark}"
