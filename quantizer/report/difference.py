"""What two calibrations, or two plans, of one model have that differs, tensor by tensor. Reads; runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.engine import results
from quantizer.engine.results import REPORT
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.report.tables import finite
from quantizer.report.view import Listing, View

Json = dict[str, Any]
Key = tuple[str, str]
SQNR = ("local_sqnr_db", "accumulated_sqnr_db")
MORE_IS_BETTER = ("sqnr_db", "cosine", "top1_agreement", "equal_outputs", "top1")
LESS_IS_BETTER = ("perplexity", "weight_bytes")
"""Figures of a result that say which of two is worse. Metrics of the user's own do not tell."""
TOLERANCE = 1e-3
"""By so little, relative to the first, figures may differ from machine to machine."""


@dataclass(frozen=True)
class Side:
    """One of the two: its tensors, each a spec as JSON and what is known of it besides, and its figures by name."""

    model: str
    tensors: Mapping[Key, Json]
    figures: Mapping[str, float | None]
    paths: Mapping[str, str]


@dataclass(frozen=True)
class Difference:
    """The tensors and the figures that differ, each with both values; None where one side has none."""

    rows: list[Json]
    figures: Mapping[str, tuple[float | None, float | None]]
    worse: tuple[str, ...]

    def to_json(self) -> Json:
        """For programs."""
        return {"tensors": self.rows, "figures": dict(self.figures), "worse": list(self.worse)}


def of_folder(place: Path) -> Side:
    """A result folder; with SQNRs if it was tested.

    Raises:
        ResultError: it is incomplete, or was changed.
    """
    opened = results.read_info(place)
    plan, tested = opened.plan, opened.about(REPORT)
    measured = {(row["layer"], row["tensor"]): row for row in tested.get("layers", ())}
    tensors = {
        (layer, role): {"spec": entry["spec"], "scale": entry.get("scale"), "zero_point": entry.get("zero_point")}
        | {name: measured.get((layer, role), {}).get(name) for name in SQNR}
        for layer, roles in opened.entries.items()
        for role, entry in roles.items()
    }
    figures = tested.get("metrics", {}) | {"weight_bytes": plan["weight_bytes"]["quantized"]}
    return Side(opened.header["model"], tensors, figures, plan["paths"])


def of_plan(plan: Plan, paths: Mapping[str, str]) -> Side:
    """What a config does to a model, whose layers have these module paths."""
    tensors = {key: {"spec": tensor.spec.to_json()} for key, tensor in plan.tensors.items()}
    return Side(plan.graph.model, tensors, {"weight_bytes": weight_bytes(plan)[1]}, paths)


def difference(first: Side, second: Side) -> Difference:
    """What differs, in the order of the first; `worse` are the figures by which the second loses."""
    keys = [*first.tensors, *(key for key in second.tensors if key not in first.tensors)]
    rows = [row for key in keys if (row := _row(key, first.tensors.get(key), second.tensors.get(key)))]
    names = [*first.figures, *(name for name in second.figures if name not in first.figures)]
    figures = {name: (first.figures.get(name), second.figures.get(name)) for name in names}
    differing = {name: pair for name, pair in figures.items() if pair[0] != pair[1]}
    return Difference(rows, differing, tuple(name for name, pair in differing.items() if _is_worse(name, *pair)))


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


def _is_worse(name: str, before: float | None, after: float | None) -> bool:
    """Whether a figure says that the second is worse; no figure where there was one is worse, too."""
    if name not in (*MORE_IS_BETTER, *LESS_IS_BETTER) or before is None:
        return False
    sign = 1 if name in MORE_IS_BETTER else -1
    return after is None or sign * (before - after) > TOLERANCE * abs(before)


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
    return view.listing(titles, texts, [_fall(row) for row in found.rows], numbers=titles[3:], what="tensor")


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
    return "" if pair is None else " → ".join("" if value is None else f"{value:.2f}" for value in pair)


def _ratio(pair: list[Any] | None) -> str:
    """How much larger scales became: of several the least and the most."""
    if pair is None:
        return ""
    before, after = (value if isinstance(value, list) else [value] for value in pair)
    if len(before) != len(after) or not all(isinstance(value, (int, float)) and value for value in (*before, *after)):
        return "other scales"
    ratios = [y / x for x, y in zip(before, after, strict=True)]
    least, most = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
    return least if least == most else f"{least} … {most}"


def figure_lines(found: Difference) -> Iterator[str]:
    """One line for each figure."""
    for name, (before, after) in found.figures.items():
        texts = ["none" if value is None else f"{finite(value):.6g}" for value in (before, after)]
        yield f"{name} {' → '.join(texts)}{', worse' if name in found.worse else ''}"
