"""What the report shows, as values: report.json. Read from a result folder alone; nothing is
run.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.errors import ResultError
from quantizer.numerics.histogram import Histogram
from quantizer.numerics.qparams import QParams
from quantizer.observers import Observer
from quantizer.plan.size import parameter_bytes
from quantizer.report.distribution import Distribution
from quantizer.report.tables import describe_spec, finite
from quantizer.results.folder import ALGORITHMS, ANALYSIS, STATISTICS, OpenedResults
from quantizer.results.validation import checked_json
from quantizer.storage.files import deferred_tensors

Json = dict[str, Any]
STABLE = 0.02
"""A range is stable once later batches change its scale by no more than this share."""
POINTS = 24
"""Numbers of batches after which a curve says what was known."""
MOST_BITS = 16
"""Wider codes are more than a sample has values."""
STRIPES = 240
"""Channels, or runs of them, of which a strip shows the range."""


COMMAND_ORDER = ("merge", "calib", "test")
"""Commands that results come from, in the order in which they run."""


def content(
    opened: OpenedResults,
    tested: Mapping[str, Any],
    commands: Mapping[str, list[str]] | None = None,
) -> Json:
    """Of a calibration, and of a test of it: what `tables.report` makes of one, or nothing.

    Raises:
        ResultError: a file is missing or damaged.
    """
    info: Json = {"header": opened.header, "tensors": opened.entries}
    files, analysis = opened.files, opened.about(ANALYSIS)
    analysis.pop("calibration", None)
    beside = {
        "algorithms": checked_json(files[ALGORITHMS]) if ALGORITHMS in files else None,
        "analysis": analysis or None,
    }
    statistics = deferred_tensors(files[STATISTICS])
    try:
        lines = _commands(opened.commands if commands is None else commands)
        return _content(info, opened.plan, tested, statistics) | beside | {"commands": lines}
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        why = (
            f"{opened.folder} has no results that a report can be made of: "
            f"{type(error).__name__}: {error}"
        )
        raise ResultError(why, help="run --quant_mode calib again") from error


def _content(
    info: Json, plan: Json, tested: Mapping[str, Any], statistics: Mapping[str, Tensor]
) -> Json:
    measured = {(row["layer"], row["tensor"]): row for row in tested.get("layers", ())}
    name = (plan.get("config") or {}).get("name", "")
    rows = [
        _measured(measured.get((row["layer"], row["tensor"]), {}))
        | row
        | {"line": _line(row["origins"], name)}
        for row in _tensors(info["tensors"], plan, _by_tensor(statistics))
    ]
    declared = {key: tested[key] for key in ("lower_is_better",) if key in tested}
    return {
        "model": info["header"]["model"],
        "header": {name: info["header"][name] for name in _SHOWN if name in info["header"]},
        "metrics": tested.get("metrics", {}),
        "pairs": tested.get("pairs", {}),
        "outputs": tested.get("outputs", []),
        "warnings": tested.get("warnings", []),
        **declared,
        "gates": tested.get("gates", {}),
        "passes": tested.get("passes"),
        "stamp": tested.get("stamp", info["header"].get("stamp")),
        "weight_bytes": plan["weight_bytes"],
        "layers": sorted(rows, key=_damage),
        "paths": plan["paths"],
        "floats": {
            row["name"]: row["activation_is_float"]
            for row in plan["layers"]
            if "activation_is_float" in row
        },
        "config": plan.get("config"),
    }


def _line(origins: list[str], name: str) -> int | None:
    """The line of the config of this name that says most about a tensor: the last one of those
    that say something.
    """
    found = [re.fullmatch(rf"{re.escape(name)}:(\d+):\d+", place) for place in origins]
    return max((int(match[1]) for match in found if match is not None), default=None)


def _damage(row: Json) -> float:
    """The most damaged first; what is not measured, or without loss, in the order of execution
    after it.
    """
    return math.inf if row["local_sqnr_db"] is None else row["local_sqnr_db"]


def _commands(commands: Mapping[str, list[str]]) -> list[str]:
    """The commands that make these results again, in their order, for a shell."""
    return [shlex.join(commands[mode]) for mode in COMMAND_ORDER if mode in commands]


_SHOWN = ("quantizer", "torch", "threads", "batches", "data", "seed", "config")
_MEASURED = ("local_sqnr_db", "accumulated_sqnr_db", "cosine")


def _measured(row: Json) -> Json:
    return {name: row.get(name) for name in _MEASURED}


def _by_tensor(statistics: Mapping[str, Tensor]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The statistics of each tensor, by their names."""
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in statistics.items():
        layer, role, name = key.rsplit("|", 2)
        found.setdefault((layer, role), {})[name] = tensor
    return found


def _tensors(
    entries: Mapping[str, Mapping[str, Json]],
    plan: Json,
    statistics: Mapping[tuple[str, str], dict[str, Tensor]],
) -> Iterator[Json]:
    """A row for each quantized tensor, in the order of execution."""
    observed = _observed(plan, statistics)
    for order, node in enumerate(plan["layers"]):
        for role, planned in node.get("tensors", {}).items():
            entry = entries.get(node["name"], {}).get(role)
            if entry is None:
                continue
            spec = QuantizationSpec(**entry["spec"])
            row: Json = {
                "layer": node["name"],
                "tensor": role,
                "op": node["op"],
                "order": order,
            }
            row["spec"] = describe_spec(spec)
            row["origins"] = sorted(
                {place for place in planned["origins"].values() if place != "default"}
            )
            if "observed_min" in entry:
                row |= _range(entry)
            if is_parameter(role) and "codes" in entry:
                values = torch.Size(entry["codes"]["shape"]).numel()
                scales = torch.Size(entry.get("scale_shape", ())).numel() or len(
                    _list(entry.get("scale", 1.0))
                )
                row["bytes"] = parameter_bytes(values, spec, scales)
            elif not is_parameter(role) and "scale" in entry and spec.qscheme == "per_tensor":
                source = planned.get("source", node["name"])
                own = observed.get((source, str(planned["spec"])), {})
                seen = statistics.get((source, "histogram"), own)
                row |= _distributed(seen, own, spec, entry) if "counts" in seen else {}
            yield row


def _observed(
    plan: Json, statistics: Mapping[tuple[str, str], dict[str, Tensor]]
) -> dict[tuple[str, str], dict[str, Tensor]]:
    """What was observed of each value under each spec; one tensor keeps it for all that have
    both in common.
    """
    return {
        (planned.get("source", node["name"]), str(planned["spec"])): statistics[
            node["name"], role
        ]
        for node in plan["layers"]
        for role, planned in node.get("tensors", {}).items()
        if not is_parameter(role) and (node["name"], role) in statistics
    }


def _range(entry: Json) -> Json:
    """The least and the greatest value, and those of each channel."""
    lows, highs = _list(entry["observed_min"]), _list(entry["observed_max"])
    row: Json = {"low": min(lows), "high": max(highs)}
    if len(lows) > 1:
        at_once, widths = (
            -(-len(lows) // STRIPES),
            [high - low for low, high in zip(lows, highs, strict=True)],
        )
        starts = range(0, len(lows), at_once)
        row["channels"] = {
            "low": [min(lows[start : start + at_once]) for start in starts],
            "high": [max(highs[start : start + at_once]) for start in starts],
            "count": len(lows),
            "dead": sum(low == 0 == high for low, high in zip(lows, highs, strict=True)),
            "widths": [min(filter(None, widths), default=0.0), max(widths)],
        }
    return row


def _distributed(
    seen: Mapping[str, Tensor], own: Mapping[str, Tensor], spec: QuantizationSpec, entry: Json
) -> Json:
    """What the histogram of an activation says about its scale."""
    parts = {name: tensor + 0 for name, tensor in seen.items() if name != "batches"}
    values = Distribution(Histogram.from_tensors(parts), spec)
    qparams = QParams(
        torch.tensor(entry["scale"]),
        torch.tensor(entry.get("zero_point", 0), dtype=torch.int32),
    )
    row: Json = {
        "limits": values.limits(qparams),
        "clipped": values.clipped(qparams),
        "step": float(qparams.scale),
        "histogram": values.drawn(),
        "methods": values.methods(qparams),
    }
    if spec.dtype == "int" and spec.bit_width <= MOST_BITS:
        row["codes_used"] = values.codes_used(qparams)
    if spec.statistic != POOLED and "batches" in own:
        row["batches"] = _sufficiency(own["batches"] + 0, values)
    return row


def _sufficiency(ranges: Tensor, values: Distribution) -> Json:
    """What was known after so many batches: the limits, the scale's quality, and from where on
    nothing changes.
    """
    total = len(ranges)
    counts = sorted({max(1, round(total * at / POINTS)) for at in range(1, POINTS + 1)})
    curve = []
    for count in counts:
        observer = Observer(values.spec)
        observer.load_state_dict({"batches": ranges[:count]})
        curve.append(observer.qparams())
    last = float(curve[-1].scale)
    apart = [abs(float(each.scale) / last - 1) > STABLE for each in curve]
    unstable = [count for count, is_apart in zip(counts, apart, strict=True) if is_apart]
    return {
        "total": total,
        "counts": counts,
        "limits": [values.limits(each) for each in curve],
        "sqnr_db": [finite(values.sqnr_db(each)) for each in curve],
        "stable_after": next(count for count in counts if not unstable or count > unstable[-1]),
    }


def _list(value: Any) -> list[float]:
    """Of one number or of several, nested or not."""
    return (
        [value]
        if not isinstance(value, list)
        else [each for part in value for each in _list(part)]
    )
