"""Collect what the report shows, report.json, from a result folder alone. Nothing is run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.config.json_types import JsonObject as Json
from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.errors import ResultError
from quantizer.numerics.histogram import Histogram
from quantizer.numerics.qparams import QParams
from quantizer.observers import Observer
from quantizer.plan.size import parameter_bytes
from quantizer.report.distribution import TensorDistribution
from quantizer.report.tables import describe_spec, finite
from quantizer.results.folder import ALGORITHMS, ANALYSIS, STATISTICS, OpenedResults
from quantizer.results.validation import checked_json
from quantizer.storage.files import deferred_tensors

STABLE = 0.02
"""A range is stable once later batches change its scale by no more than this share."""
CURVE_POINTS = 24
"""Numbers of batches after which a curve says what was known."""
WIDEST_CODES = 16
"""Bits. A sample has fewer values than wider codes."""
STRIPES = 240
"""Channels, or runs of them, of which a strip shows the range."""
COMMAND_ORDER = ("merge", "calib", "test")
"""Commands that results come from, in the order in which they run."""
_HEADER = ("quantizer", "torch", "threads", "batches", "data", "seed", "config")
_MEASURED = ("local_sqnr_db", "accumulated_sqnr_db", "cosine")
Statistics = dict[tuple[str, str], dict[str, Tensor]]
"""What observers kept, by tensor and name."""


def content(
    opened: OpenedResults,
    tested: Mapping[str, Any],
    commands: Mapping[str, list[str]] | None = None,
) -> Json:
    """Return the content of report.json.

    Args:
        opened: the calibration.
        tested: what `tables.report` returns for a test of it, or nothing.
        commands: what made the results; None for those that the folder names.

    Raises:
        ResultError: a file is missing or damaged.
    """
    info: Json = {"header": opened.header, "tensors": opened.entries}
    files, analysis = opened.files, opened.about(ANALYSIS)
    analysis.pop("calibration", None)
    algorithms = checked_json(files[ALGORITHMS]) if ALGORITHMS in files else None
    statistics = deferred_tensors(files[STATISTICS])
    try:
        lines = _commands(opened.commands if commands is None else commands)
        values = _content(info, opened.plan, tested, statistics)
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
    values |= {"algorithms": algorithms, "analysis": analysis or None, "commands": lines}
    return values


def _content(
    info: Json, plan: Json, tested: Mapping[str, Any], statistics: Mapping[str, Tensor]
) -> Json:
    """Return the content without what other files than quant_info.json and plan.json say."""
    measured: dict[tuple[str, str], Json] = {}
    for row in tested.get("layers", ()):
        measured[row["layer"], row["tensor"]] = row
    config_name = (plan.get("config") or {}).get("name", "")
    rows: list[Json] = []
    for tensor in _tensors(info["tensors"], plan, _by_tensor(statistics)):
        figures = measured.get((tensor["layer"], tensor["tensor"]), {})
        row = {name: figures.get(name) for name in _MEASURED}
        row |= tensor
        row["line"] = _line(tensor["origins"], config_name)
        rows.append(row)
    floats: dict[str, str] = {}
    for node in plan["layers"]:
        if "activation_is_float" in node:
            floats[node["name"]] = node["activation_is_float"]
    header = info["header"]
    values: Json = {
        "model": header["model"],
        "header": {name: header[name] for name in _HEADER if name in header},
        "metrics": tested.get("metrics", {}),
        "pairs": tested.get("pairs", {}),
        "outputs": tested.get("outputs", []),
        "warnings": tested.get("warnings", []),
    }
    if "lower_is_better" in tested:
        values["lower_is_better"] = tested["lower_is_better"]
    return values | {
        "gates": tested.get("gates", {}),
        "passes": tested.get("passes"),
        "stamp": tested.get("stamp", header.get("stamp")),
        "weight_bytes": plan["weight_bytes"],
        "layers": sorted(rows, key=_damage),
        "paths": plan["paths"],
        "floats": floats,
        "config": plan.get("config"),
    }


def _line(origins: list[str], name: str) -> int | None:
    """Return the last line of the config `name` that says something about a tensor."""
    lines: list[int] = []
    for origin in origins:
        match = re.fullmatch(rf"{re.escape(name)}:(\d+):\d+", origin)
        if match is not None:
            lines.append(int(match[1]))
    return max(lines, default=None)


def _damage(row: Json) -> float:
    """Return what rows are sorted by: the SQNR, and behind all others what has none."""
    sqnr_db: float | None = row["local_sqnr_db"]
    return math.inf if sqnr_db is None else sqnr_db


def _commands(commands: Mapping[str, list[str]]) -> list[str]:
    """Return the commands that make these results again, as lines for a shell."""
    return [shlex.join(commands[mode]) for mode in COMMAND_ORDER if mode in commands]


def _by_tensor(statistics: Mapping[str, Tensor]) -> Statistics:
    """Return the statistics of each tensor, by their names."""
    by_tensor: Statistics = {}
    for key, tensor in statistics.items():
        layer, role, name = key.rsplit("|", 2)
        by_tensor.setdefault((layer, role), {})[name] = tensor
    return by_tensor


def _tensors(
    entries: Mapping[str, Mapping[str, Json]], plan: Json, statistics: Statistics
) -> Iterator[Json]:
    """Yield a row for each quantized tensor, in the order of execution."""
    observed = _observed(plan, statistics)
    for order, node in enumerate(plan["layers"]):
        for role, planned in node.get("tensors", {}).items():
            entry = entries.get(node["name"], {}).get(role)
            if entry is None:
                continue
            spec = QuantizationSpec(**entry["spec"])
            origins = {place for place in planned["origins"].values() if place != "default"}
            row: Json = {
                "layer": node["name"],
                "tensor": role,
                "op": node["op"],
                "order": order,
                "spec": describe_spec(spec),
                "origins": sorted(origins),
            }
            if "observed_min" in entry:
                row |= _range(entry)
            if is_parameter(role) and "codes" in entry:
                row["bytes"] = _stored_bytes(entry, spec)
            elif not is_parameter(role) and "scale" in entry and spec.qscheme == "per_tensor":
                source = planned.get("source", node["name"])
                own_statistics = observed.get((source, str(planned["spec"])), {})
                values = statistics.get((source, "histogram"), own_statistics)
                if "counts" in values:
                    row |= _distributed(values, own_statistics, spec, entry)
            yield row


def _stored_bytes(entry: Json, spec: QuantizationSpec) -> int:
    """Return the bytes of a parameter's codes and scales."""
    values = torch.Size(entry["codes"]["shape"]).numel()
    scales = torch.Size(entry.get("scale_shape", ())).numel()
    if "scale_shape" not in entry:
        scales = len(_flat(entry.get("scale", 1.0)))
    return parameter_bytes(values, spec, scales)


def _observed(plan: Json, statistics: Statistics) -> Statistics:
    """Return what was observed of each value under each spec.

    One tensor keeps it for all that share the value and the spec.
    """
    observed: Statistics = {}
    for node in plan["layers"]:
        for role, planned in node.get("tensors", {}).items():
            key = node["name"], role
            if not is_parameter(role) and key in statistics:
                source = planned.get("source", node["name"])
                observed[source, str(planned["spec"])] = statistics[key]
    return observed


def _range(entry: Json) -> Json:
    """Return the least and the greatest value, and those of each channel."""
    lows, highs = _flat(entry["observed_min"]), _flat(entry["observed_max"])
    row: Json = {"low": min(lows), "high": max(highs)}
    if len(lows) == 1:
        return row
    widths: list[float] = []
    dead_channels = 0
    for low, high in zip(lows, highs, strict=True):
        widths.append(high - low)
        dead_channels += low == 0 == high
    run_length = math.ceil(len(lows) / STRIPES)
    starts = range(0, len(lows), run_length)
    row["channels"] = {
        "low": [min(lows[start : start + run_length]) for start in starts],
        "high": [max(highs[start : start + run_length]) for start in starts],
        "count": len(lows),
        "dead": dead_channels,
        "widths": [min(filter(None, widths), default=0.0), max(widths)],
    }
    return row


def _distributed(
    histogram: Mapping[str, Tensor],
    own_statistics: Mapping[str, Tensor],
    spec: QuantizationSpec,
    entry: Json,
) -> Json:
    """Return what the histogram of an activation says about its scale."""
    parts: dict[str, Tensor] = {}
    for name, tensor in histogram.items():
        if name != "batches":
            # Adding 0 reads a deferred tensor.
            parts[name] = tensor + 0
    values = TensorDistribution(Histogram.from_tensors(parts), spec)
    zero_point = torch.tensor(entry.get("zero_point", 0), dtype=torch.int32)
    qparams = QParams(torch.tensor(entry["scale"]), zero_point)
    row: Json = {
        "limits": values.limits(qparams),
        "clipped": values.clipped(qparams),
        "step": float(qparams.scale),
        "histogram": values.drawn(),
        "methods": values.methods(qparams),
    }
    if spec.dtype == "int" and spec.bit_width <= WIDEST_CODES:
        row["codes_used"] = values.codes_used(qparams)
    if spec.statistic != POOLED and "batches" in own_statistics:
        row["batches"] = _sufficiency(own_statistics["batches"] + 0, values)
    return row


def _sufficiency(ranges: Tensor, values: TensorDistribution) -> Json:
    """Return what was known after so many batches: the limits, the SQNR of the scale, and after
    how many batches the scale is stable.
    """
    total = len(ranges)
    steps = range(1, CURVE_POINTS + 1)
    counts = sorted({max(1, round(total * step / CURVE_POINTS)) for step in steps})
    curve: list[QParams] = []
    for count in counts:
        observer = Observer(values.spec)
        observer.load_state_dict({"batches": ranges[:count]})
        curve.append(observer.qparams())
    last_scale = float(curve[-1].scale)
    stable_after = counts[0]
    for next_count, qparams in zip(counts[1:], curve, strict=False):
        if abs(float(qparams.scale) / last_scale - 1) > STABLE:
            stable_after = next_count
    return {
        "total": total,
        "counts": counts,
        "limits": [values.limits(qparams) for qparams in curve],
        "sqnr_db": [finite(values.sqnr_db(qparams)) for qparams in curve],
        "stable_after": stable_after,
    }


def _flat(value: Any) -> list[float]:
    """Return one number, or several in nested lists, as one list."""
    if not isinstance(value, list):
        return [value]
    numbers: list[float] = []
    for item in value:
        numbers += _flat(item)
    return numbers
