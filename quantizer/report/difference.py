"""Compare two calibrations, or two plans, of one model tensor by tensor. Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.comparison.output_figures import POOLED_FIGURE, ROWS_KEPT
from quantizer.evaluation.scores import DROP, RATIO
from quantizer.plan.model import Key, Plan
from quantizer.plan.size import weight_bytes
from quantizer.report.page.rows import Json
from quantizer.report.tables import finite
from quantizer.report.view import Listing, View
from quantizer.results.folder import REPORT, read_info
from quantizer.sources.directions import BY_NAME, Directions

SQNR = ("local_sqnr_db", "accumulated_sqnr_db")
NEGLIGIBLE = 1e-3
"""By so little, relative to the first, figures may differ from machine to machine."""


@dataclass(frozen=True)
class Side:
    """One of the two calibrations or plans.

    Attributes:
        model: its name.
        tensors: by key, a spec as JSON with what else is known of the tensor.
        figures: by name.
        paths: the module path of each layer.
        metrics: the names of the figures that `evaluate` returns.
        directions: whether less or more of them is better, as far as that is declared.
    """

    model: str
    tensors: Mapping[Key, Json]
    figures: Mapping[str, float | None]
    paths: Mapping[str, str]
    metrics: frozenset[str] = frozenset()
    directions: Directions = BY_NAME


@dataclass(frozen=True)
class Difference:
    """The tensors and the figures that differ, each with both values.

    A value is None where one side has none. `worse` are the figures by which the second side
    loses. Of `unknown` figures nothing says whether less is better.
    """

    rows: list[Json]
    figures: Mapping[str, tuple[float | None, float | None]]
    worse: tuple[str, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> Json:
        """Return the difference for programs, with infinite figures as null."""
        figures: dict[str, tuple[Any, Any]] = {}
        for name, (before, after) in self.figures.items():
            figures[name] = finite(before), finite(after)
        return {
            "tensors": self.rows,
            "figures": figures,
            "worse": list(self.worse),
            "unknown": list(self.unknown),
        }


def of_folder(place: Path) -> Side:
    """Return what a result folder holds, with SQNRs if it was tested.

    Raises:
        ResultError: it is incomplete, or was changed.
    """
    opened = read_info(place)
    plan, tested = opened.plan, opened.about(REPORT)
    measured: dict[Key, Json] = {}
    for row in tested.get("layers", ()):
        measured[row["layer"], row["tensor"]] = row
    tensors: dict[Key, Json] = {}
    for layer, roles in opened.entries.items():
        for role, entry in roles.items():
            tensor: Json = {"spec": entry["spec"]}
            for name in ("scale", "zero_point"):
                tensor[name] = entry.get(name)
            for name in SQNR:
                tensor[name] = measured.get((layer, role), {}).get(name)
            tensors[layer, role] = tensor
    return Side(
        model=opened.header["model"],
        tensors=tensors,
        figures=_figures(tested) | {"weight_bytes": plan["weight_bytes"]["quantized"]},
        paths=plan["paths"],
        metrics=frozenset(tested.get("pairs", {})),
        directions=Directions.of_declared(tested.get("lower_is_better", {})),
    )


def _figures(tested: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a test, and those of each output or part if there are several."""
    figures: dict[str, float | None] = dict(tested.get("metrics", {}))
    outputs = tested.get("outputs", [])
    if "sqnr_db" in figures and figures["sqnr_db"] is None:
        sqnrs = [_sqnr_of(row) for row in outputs]
        figures["sqnr_db"] = min((sqnr for sqnr in sqnrs if sqnr is not None), default=None)
    if len(outputs) < 2:
        # Of a single part it says nothing more.
        figures.pop(POOLED_FIGURE, None)
        return figures
    if POOLED_FIGURE in figures and figures[POOLED_FIGURE] is None:
        figures[POOLED_FIGURE] = figures["sqnr_db"]
    for row in outputs:
        for figure, value in _figures_of(row):
            figures[f"{figure}[{row['name']}]"] = value
    return figures


def _figures_of(row: Json) -> Iterator[tuple[str, float | None]]:
    """Yield the figures of one output or part. For floats, equal values are no quality."""
    if row["kind"] == "float":
        yield "sqnr_db", _sqnr_of(row)
        yield "cosine", row["cosine"]
    elif row["kind"] != "empty":
        yield "equal_outputs", row["equal"]
    order = row.get("rows")
    if order is not None and order["rows"]:
        yield ROWS_KEPT, 1 - order["exchanged"] / order["rows"]


def _sqnr_of(row: Json) -> float | None:
    """Return the SQNR of an output or part, or None if it has none.

    Files have null for an infinite SQNR.
    """
    sqnr_db: float | None = row["sqnr_db"]
    if sqnr_db is not None or row["kind"] != "float":
        return sqnr_db
    return math.inf if row["equal"] == 1 else -math.inf


def of_plan(plan: Plan, paths: Mapping[str, str]) -> Side:
    """Return what a config does to a model whose layers have these module paths."""
    tensors: dict[Key, Json] = {}
    for key, tensor in plan.tensors.items():
        tensors[key] = {"spec": tensor.spec.to_json()}
    _, quantized_bytes = weight_bytes(plan)
    return Side(plan.graph.model, tensors, {"weight_bytes": quantized_bytes}, paths)


def difference(first: Side, second: Side) -> Difference:
    """Return what differs, in the order of the first side."""
    rows: list[Json] = []
    for key in dict.fromkeys((*first.tensors, *second.tensors)):
        row = _row(key, first.tensors.get(key), second.tensors.get(key))
        if row is not None:
            rows.append(row)
    differing: dict[str, tuple[float | None, float | None]] = {}
    for name in dict.fromkeys((*first.figures, *second.figures)):
        before, after = first.figures.get(name), second.figures.get(name)
        if before != after:
            differing[name] = before, after
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
    """Return whether a figure follows from a metric, which is compared itself."""
    for suffix in ("_float", DROP, RATIO):
        if name.endswith(suffix) and name.removesuffix(suffix) in metrics:
            return True
    return False


def _row(key: Key, before: Json | None, after: Json | None) -> Json | None:
    """Return the values of a tensor that differ, or None if none does."""
    layer, role = key
    row: Json = {"layer": layer, "tensor": role}
    if before is None or after is None:
        row["only_in"] = "second" if before is None else "first"
        return row
    specs = _differing(before["spec"], after["spec"], after["spec"])
    values = _differing(before, after, ("scale", "zero_point", *SQNR))
    if not specs and not values:
        return None
    return row | {"spec": specs} | values


def _differing(before: Json, after: Json, names: Iterable[str]) -> Json:
    """Return both values of each name whose values differ."""
    values: Json = {}
    for name in names:
        if before.get(name) != after.get(name):
            values[name] = [before.get(name), after.get(name)]
    return values


def _is_worse(before: float | None, after: float | None, *, is_lower_better: bool) -> bool:
    """Return whether the second value of a figure is worse.

    A missing value where there was one is worse, too.
    """
    if before is None or before == -math.inf:
        return False
    if after is None:
        return True
    loss = after - before if is_lower_better else before - after
    return loss == math.inf or loss > NEGLIGIBLE * abs(before)


def difference_table(different: Difference, view: View) -> Listing:
    """Return the tensors that differ. Those whose SQNR fell most are shown first."""
    titles = ("layer", "tensor", "changed", "scale ratio", "local dB", "accumulated dB")
    texts: list[tuple[str, ...]] = []
    ranks: list[float | None] = []
    for row in different.rows:
        sqnrs = [_pair(row.get(name)) for name in SQNR]
        changes = ", ".join(_words(row))
        scales = _ratio(row.get("scale"))
        texts.append((row["layer"], row["tensor"], changes, scales, *sqnrs))
        ranks.append(_fall(row))
    return view.listing(titles, texts, ranks, numbers=titles[3:], what="tensor")


def _words(row: Json) -> Iterator[str]:
    """Yield what changed in the spec of a tensor."""
    if "only_in" in row:
        yield f"only in the {row['only_in']}"
    for name, (before, after) in row.get("spec", {}).items():
        yield f"{name} {before} → {after}"


def _fall(row: Json) -> float:
    """Return the change of the accumulated SQNR, and 0 where it is not measured."""
    before, after = row.get("accumulated_sqnr_db", (None, None))
    if before is None or after is None:
        return 0.0
    return float(after - before)


def _pair(pair: list[float | None] | None) -> str:
    """Return two values as text, or nothing if they do not differ."""
    if pair is None:
        return ""
    return " → ".join(["" if value is None else f"{value:.2f}" for value in pair])


def _ratio(pair: list[Any] | None) -> str:
    """Return by what factor a scale changed; of several scales the least and the largest."""
    if pair is None:
        return ""
    before, after = (value if isinstance(value, list) else [value] for value in pair)
    are_numbers = all(isinstance(value, (int, float)) and value for value in (*before, *after))
    if len(before) != len(after) or not are_numbers:
        return "other scales"
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    least, most = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
    return least if least == most else f"{least} … {most}"


def figure_lines(different: Difference) -> Iterator[str]:
    """Yield a line for each figure."""
    for name, values in different.figures.items():
        texts = ["none" if value is None else f"{value:.6g}" for value in values]
        remark = ""
        if name in different.worse:
            remark = ", worse"
        elif name in different.unknown:
            remark = ", not judged: nobody says whether less or more is better"
        yield f"{name} {' → '.join(texts)}{remark}"
