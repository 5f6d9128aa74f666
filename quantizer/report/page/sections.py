"""Compute what the templates of the page show and report.json does not hold as such."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from quantizer.evaluation.pass_loss import pass_loss_line
from quantizer.report.page import figures
from quantizer.report.page.charts import number
from quantizer.report.page.rows import (
    Json,
    most_damaged,
    name_of,
    tensor_name,
    weakest_output,
)

SATURATED = 0.01
"""A share of clipped values that is worth a look."""
STEEP_DB = 3.0
"""A loss from one tensor to the next that is worth a sentence."""


def verdict(content: Json) -> list[str]:
    """Return the parts of the sentence that the page begins with."""
    metrics, rows = content["metrics"], content["layers"]
    layers = {row["layer"] for row in rows}
    parts = [f"{len(rows)} tensors of {len(layers)} layers quantized"]
    sqnr_db = metrics.get("sqnr_db")
    if sqnr_db is not None:
        outputs = content.get("outputs", ())
        weakest = weakest_output(outputs)
        name = "output"
        if weakest is not None and len(outputs) > 1:
            name = f"worst output {weakest['name']}:"
        parts.append(f"{name} SQNR {sqnr_db:.1f} dB")
    worst = most_damaged(rows)
    if worst is not None:
        parts.append(f"worst: {tensor_name(content, worst)}, {worst['local_sqnr_db']:.1f} dB")
    if content.get("passes"):
        parts.append(pass_loss_line(content["passes"]))
    for text, holds in content["gates"].items():
        parts.append(f"gate {text} {'met' if holds else 'not met'}")
    if content["stamp"]:
        parts.append(content["stamp"])
    return parts


def key_figures(content: Json) -> dict[str, str]:
    """Return the figures below the verdict: metrics, and the size of the weights."""
    shown: dict[str, str] = {}
    for name, value in content["metrics"].items():
        if value is not None:
            shown[name] = number(value)
    for name, pair in content["pairs"].items():
        shown[name] = f"{_finite(pair['float'])} → {_finite(pair['quantized'])}"
    sizes = content["weight_bytes"]
    shown["weights"] = f"{sizes['float'] / 1e6:.2f} → {sizes['quantized'] / 1e6:.2f} MB"
    shown["compression"] = f"{sizes['float'] / max(1, sizes['quantized']):.2f}"
    return shown


def _finite(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def warned_outputs(content: Json) -> set[str]:
    """Return the outputs that a warning is about."""
    names: set[str] = set()
    for warning in content.get("warnings", ()):
        if warning["kind"] != "rows":
            names.add(warning["output"])
    return names


@dataclass(frozen=True)
class Fall:
    """Between which tensor and the one before it the network loses most."""

    loss_db: float
    tensor: str


def steepest_fall(content: Json) -> Fall | None:
    """Return where the accumulated SQNR falls most, or None where it falls little."""
    falls: list[Fall] = []
    for before, after in itertools.pairwise(figures.measured(content)):
        loss_db = before["accumulated_sqnr_db"] - after["accumulated_sqnr_db"]
        falls.append(Fall(loss_db, tensor_name(content, after)))
    steepest = max(falls, key=lambda fall: fall.loss_db, default=None)
    if steepest is None or steepest.loss_db <= STEEP_DB:
        return None
    return steepest


def channel_facts(row: Json) -> str:
    """Return what a folded weight says of its channels."""
    channels = row["channels"]
    least, most = channels["widths"]
    facts = f"{channels['count']} channels, {channels['dead']} of them dead"
    if least:
        facts += f", the widest range {number(most / least)} times the narrowest"
    return facts


def last_to_be_stable(content: Json) -> list[Json]:
    """Return the tensors with ranges by batch, those first whose ranges change longest."""
    rows = [row for row in content["layers"] if "batches" in row]
    return sorted(rows, key=lambda row: -row["batches"]["stable_after"])


def still_changes(row: Json) -> bool:
    """Return whether the range of a tensor changes with the last of several batches."""
    batches = row["batches"]
    return bool(batches["total"] > 1 and batches["stable_after"] == batches["total"])


def stable_after(content: Json, rows: list[Json]) -> list[str]:
    """Return a line for each tensor: its name, and after how many batches it is stable."""
    return [f"{tensor_name(content, row)}: {row['batches']['stable_after']}" for row in rows]


def coverage(content: Json) -> dict[str, list[str]]:
    """Return the tensors that were not observed or are of no use, by what is wrong."""
    clipped = f"more than {100 * SATURATED:g} % cut off"
    lists: dict[str, list[str]] = {
        "always zero": [],
        "constant": [],
        clipped: [],
        "with dead channels": [],
        "in float": [],
    }
    for row in content["layers"]:
        name = tensor_name(content, row)
        if "low" in row and row["low"] == row["high"]:
            lists["constant" if row["low"] else "always zero"].append(name)
        if row.get("clipped", 0) > SATURATED:
            lists[clipped].append(name)
        if row.get("channels", {}).get("dead", 0) > 0:
            lists["with dead channels"].append(name)
    for layer, reason in content["floats"].items():
        if not reason.startswith("quantized at"):
            lists["in float"].append(f"{name_of(content, layer)}: {reason}")
    return lists


def remarks(content: Json) -> list[str]:
    """Return what algorithms said of single layers."""
    return [
        f"{name_of(content, remark['layer'])}: {remark['text']}"
        for remark in content["algorithms"]["remarks"]
    ]


def width_titles(widths: list[str]) -> list[str]:
    """Return the titles of the columns of a table of widths."""
    return [f"{width}: noise" for width in widths]
