"""Collect the content of report.json from the files of a result folder. No network is run."""

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.errors import DAMAGE_ERRORS, ResultError, UsageError
from quantizer.graph.ops import OPS
from quantizer.numerics.codes import bits_of
from quantizer.numerics.histogram import Histogram
from quantizer.numerics.qparams import QParams
from quantizer.observers import Observer
from quantizer.plan.model import Key
from quantizer.plan.resolve import NO_RULES
from quantizer.plan.size import parameter_bytes
from quantizer.plugins import loaded, plugins, remedy_for_absent
from quantizer.report.distribution import TensorDistribution
from quantizer.report.next_step import without_places
from quantizer.report.tables import describe_spec, figures_by_tensor, finite_or_none
from quantizer.results.folder import (
    ALGORITHMS_FILE,
    ANALYSIS_FILE,
    REPORT_FILE,
    STATISTICS_FILE,
    OpenedResults,
)
from quantizer.results.validation import checked_json
from quantizer.storage.files import deferred_tensors, write_json, write_text

_STABLE = 0.02
"""A scale is stable from the batch on after which it changes by no more than this share."""
_MAX_CURVE_POINTS = 24
"""The most points of a curve over batches."""
_MAX_COUNTED_BITS = 16
"""Up to this bit width, the report says which share of the codes is used. Wider formats have
more codes than the sample has values.
"""
_MAX_STRIP_BARS = 240
"""The most bars of a strip of channels. With more channels, a bar is the range of several."""
_COMMAND_ORDER = ("merge", "calib", "retune", "test")
"""The modes of commands that make results, in the order in which they run."""
_HEADER = ("quantizer", "torch", "threads", "batches", "data", "seed", "config")
_OF_TEST: JsonMapping = {
    "metrics": {},
    "pairs": {},
    "outputs": [],
    "inputs": [],
    "warnings": [],
    "gates": {},
    "passes": None,
    "judged_on": None,
    "stamp": None,
    "exports": [],
    "fault": "",
    "improvement": "",
}
"""What comes from a test, with the values that stand for none."""
_MEASURED = ("local_sqnr_db", "accumulated_sqnr_db", "cosine")
_TensorStatistics = dict[Key, dict[str, Tensor]]
"""The statistics of observers, by tensor and name."""

REPORT_PAGE = "report.html"
Commands = Mapping[str, list[str]]


def collect_report(
    opened: OpenedResults, tested: JsonMapping, commands: Commands | None = None
) -> JsonObject:
    """Return the content of report.json.

    Args:
        opened: the calibration.
        tested: what `tables.report_values` returns for a test of it, or an empty dict.
        commands: the commands that made the results, by mode. By default those of run.json.

    Raises:
        ResultError: a file is missing or damaged.
    """
    analysis = opened.read_findings(ANALYSIS_FILE)
    analysis.pop("calibration", None)
    algorithms = None
    if ALGORITHMS_FILE in opened.files:
        algorithms = checked_json(opened.files[ALGORITHMS_FILE])
    tensors = deferred_tensors(opened.files[STATISTICS_FILE])
    values = _collect_results(opened, tested, _group_by_tensor(tensors))
    by_mode = opened.commands if commands is None else commands
    modes = [mode for mode in _COMMAND_ORDER if mode in by_mode]
    values["commands"] = [shlex.join(by_mode[mode]) for mode in modes]
    values["algorithms"] = algorithms
    values["analysis"] = analysis or None
    return values


def _collect_results(
    opened: OpenedResults, tested: JsonMapping, statistics: _TensorStatistics
) -> JsonObject:
    """Return the content that comes from the calibration and from a test of it."""
    header = opened.header
    plan = opened.plan
    config = plan.get("config") or {}
    measured = figures_by_tensor(tested)
    rows = []
    for tensor in _tensor_rows(opened.entries, plan, statistics):
        figures = measured.get((tensor["layer"], tensor["tensor"]), {})
        row = {name: figures.get(name) for name in _MEASURED}
        row |= tensor
        row["line"] = _config_line(tensor["origins"], config.get("name", ""))
        rows.append(row)
    reason = "activation_is_float"
    floats = {node["name"]: node[reason] for node in plan["layers"] if reason in node}
    float_weights = {}
    for node in plan["layers"]:
        operator = OPS.get(node["op"])
        if operator is None or not operator.weight:
            continue
        is_quantized = "weights" in map(base_role, node.get("tensors", ()))
        if not is_quantized and (operator.kind == "mac" or operator.looks_up):
            float_weights[node["name"]] = node.get(reason, NO_RULES)
    values: JsonObject = {
        "model": header["model"],
        "header": {name: header[name] for name in _HEADER if name in header},
        "calibration_stamp": header.get("stamp"),
        "weight_bytes": plan["weight_bytes"],
        "layers": sorted(rows, key=_sort_key_of_damage),
        "paths": plan["paths"],
        "floats": floats,
        "float_weights": float_weights,
        "config": plan.get("config"),
    }
    kept = {name: tested[name] for name in (*_OF_TEST, "lower_is_better") if name in tested}
    return {**_OF_TEST, **values, **kept}


def _config_line(origins: list[str], name: str) -> int | None:
    """Return the number of the last line of a config that decides a setting of a tensor.

    Args:
        origins: where the settings come from, such as "config.json:12:5".
        name: of the config.
    """
    pattern = rf"{re.escape(name)}:(\d+):\d+"
    matches = [re.fullmatch(pattern, origin) for origin in origins]
    return max((int(match[1]) for match in matches if match is not None), default=None)


def _sort_key_of_damage(row: JsonMapping) -> float:
    """Return the SQNR by which rows are sorted. Rows without one come last."""
    sqnr_db: float | None = row["local_sqnr_db"]
    return math.inf if sqnr_db is None else sqnr_db


def _group_by_tensor(tensors: Mapping[str, Tensor]) -> _TensorStatistics:
    """Return the statistics of each tensor, by their names."""
    statistics: _TensorStatistics = {}
    for key, tensor in tensors.items():
        layer, role, name = key.rsplit("|", 2)
        statistics.setdefault((layer, role), {})[name] = tensor
    return statistics


def _tensor_rows(
    entries: Mapping[str, Mapping[str, JsonMapping]],
    plan: JsonMapping,
    statistics: _TensorStatistics,
) -> Iterator[JsonObject]:
    """Yield a row for each quantized tensor, in the order of execution."""
    observed = _statistics_by_value(plan, statistics)
    for order, node in enumerate(plan["layers"]):
        layer = node["name"]
        for role, planned in node.get("tensors", {}).items():
            entry = entries.get(layer, {}).get(role)
            if entry is None:
                continue
            spec = QuantizationSpec(**entry["spec"])
            origins = {place for place in planned["origins"].values() if place != "default"}
            row: JsonObject = {
                "layer": layer,
                "tensor": role,
                "op": node["op"],
                "order": order,
                "spec": describe_spec(spec),
                "bits": bits_of(spec),
                "origins": sorted(origins),
            }
            if "observed_min" in entry:
                row |= _observed_range(entry)
            if is_parameter(role):
                if "codes" in entry:
                    row["bytes"] = _stored_bytes(entry, spec)
            elif "scale" in entry and spec.qscheme == "per_tensor":
                source = planned.get("source", layer)
                own_statistics = observed.get((source, str(planned["spec"])), {})
                histogram = statistics.get((source, "histogram"), own_statistics)
                if "counts" in histogram:
                    row |= _distribution(histogram, own_statistics, spec, entry)
            yield row


def _stored_bytes(entry: JsonMapping, spec: QuantizationSpec) -> int:
    """Return the bytes of a parameter's codes and scales."""
    scale_shape = entry.get("scale_shape", torch.tensor(entry.get("scale", 1.0)).shape)
    values, scales = torch.Size(entry["codes"]["shape"]), torch.Size(scale_shape)
    return parameter_bytes(values.numel(), spec, scales.numel())


def _statistics_by_value(plan: JsonMapping, statistics: _TensorStatistics) -> _TensorStatistics:
    """Return the statistics of activations, by the layer that computes the value and the spec.

    Several tensors may read the same value with the same spec. Only one of them has statistics.
    """
    observed = {}
    for node in plan["layers"]:
        layer = node["name"]
        for role, planned in node.get("tensors", {}).items():
            if not is_parameter(role) and (layer, role) in statistics:
                source = planned.get("source", layer)
                observed[source, str(planned["spec"])] = statistics[layer, role]
    return observed


def _observed_range(entry: JsonMapping) -> JsonObject:
    """Return the least and the greatest value of a tensor, and those of its channels.

    A dead channel has only zeros.
    """
    lows = _flatten(entry["observed_min"])
    highs = _flatten(entry["observed_max"])
    row: JsonObject = {"low": min(lows), "high": max(highs)}
    if len(lows) == 1:
        return row
    ends = [*zip(lows, highs, strict=True)]
    widths = [high - low for low, high in ends]
    run_length = math.ceil(len(lows) / _MAX_STRIP_BARS)
    starts = range(0, len(lows), run_length)
    row["channels"] = {
        "low": [min(lows[start : start + run_length]) for start in starts],
        "high": [max(highs[start : start + run_length]) for start in starts],
        "count": len(lows),
        "dead": ends.count((0, 0)),
        "widths": [min(filter(None, widths), default=0.0), max(widths)],
    }
    return row


def _distribution(
    histogram: Mapping[str, Tensor],
    own_statistics: Mapping[str, Tensor],
    spec: QuantizationSpec,
    entry: JsonMapping,
) -> JsonObject:
    """Return what the histogram of an activation shows about its scale.

    Args:
        histogram: the histogram of the value.
        own_statistics: the statistics of this tensor, perhaps with its range after each batch.
        spec: of the tensor.
        entry: of quant_info.json.
    """
    # Adding 0 loads a deferred tensor
    tensors = {name: tensor + 0 for name, tensor in histogram.items() if name != "batches"}
    distribution = TensorDistribution(Histogram.from_tensors(tensors), spec)
    zero_point = torch.tensor(entry.get("zero_point", 0), dtype=torch.int32)
    qparams = QParams(torch.tensor(entry["scale"]), zero_point)
    row: JsonObject = {
        "limits": distribution.limits(qparams),
        "clipped": distribution.clipped(qparams),
        "step": float(qparams.scale),
        "histogram": distribution.drawn(),
        "methods": distribution.methods(qparams),
    }
    if spec.dtype == "int" and spec.bit_width <= _MAX_COUNTED_BITS:
        row["codes_used"] = distribution.codes_used(qparams)
    if spec.statistic != POOLED and "batches" in own_statistics:
        row["batches"] = _stability_curve(own_statistics["batches"] + 0, distribution)
    return row


def _stability_curve(ranges: Tensor, distribution: TensorDistribution) -> JsonObject:
    """Return the limits and the SQNR that fewer batches would have given, and after how many
    batches the scale is stable.

    Args:
        ranges: of each batch.
        distribution: of all values.
    """
    total = len(ranges)
    steps = range(1, _MAX_CURVE_POINTS + 1)
    counts = sorted({max(1, round(total * step / _MAX_CURVE_POINTS)) for step in steps})
    curve: JsonObject = {"total": total, "counts": counts, "limits": [], "sqnr_db": []}
    scales = []
    for count in counts:
        observer = Observer(distribution.spec)
        observer.load_state_dict({"batches": ranges[:count]})
        qparams = observer.qparams()
        scales.append(float(qparams.scale))
        curve["limits"].append(distribution.limits(qparams))
        curve["sqnr_db"].append(finite_or_none(distribution.sqnr_db(qparams)))
    curve["stable_after"] = counts[0]
    for next_count, scale in zip(counts[1:], scales, strict=False):
        if abs(scale / scales[-1] - 1) > _STABLE:
            curve["stable_after"] = next_count
    return curve


def _flatten(value: Any) -> list[float]:
    """Return a number, or the numbers of nested lists, as one list."""
    if not isinstance(value, list):
        return [value]
    return [number for item in value for number in _flatten(item)]


def make_report(
    opened: OpenedResults, tested: JsonMapping, commands: Commands | None = None
) -> tuple[JsonObject, str]:
    """Return the content of report.json, and of report.html, which is empty without a plug-in
    that makes it.

    Args:
        opened: the calibration.
        tested: what `tables.report_values` returns for a test of it, or an empty dict.
        commands: the commands that made the results, by mode. By default those of run.json.

    Raises:
        ResultError: a file is missing or damaged.
    """
    try:
        text = json.dumps(collect_report(opened, tested, commands), sort_keys=True)
        # The page must be the same when it is made from report.json later
        values: JsonObject = json.loads(text)
        return values, _page(values)
    except DAMAGE_ERRORS as error:
        why = (
            f"{opened.folder} has no results that a report can be made of: "
            f"{type(error).__name__}: {error}"
        )
        raise ResultError(why, help="run --quant_mode calib again") from error


def write_report(
    opened: OpenedResults,
    tested: JsonMapping | None = None,
    place: Path | None = None,
    *,
    commands: Commands | None = None,
) -> JsonObject:
    """Write the report of a calibration, and return the values of report.json.

    Args:
        opened: the calibration. To write into its folder, the caller must hold the lock and
            have checked that the calibration was not replaced.
        tested: the figures of a test, as for `make_report`. By default those of the report that
            is already in the folder.
        place: the folder to write to. By default that of the calibration.
        commands: as for `make_report`.

    Raises:
        ResultError: a file is damaged, or cannot be written.
    """
    if tested is None:
        tested = opened.read_findings(REPORT_FILE)
    values, html = make_report(opened, tested, commands)
    _write(opened, values, html, place or opened.folder)
    return values


def add_to_report(
    opened: OpenedResults, values: JsonMapping, added: JsonMapping, folder: Path
) -> JsonObject:
    """Write a report again with further values, and return all values.

    Args:
        opened: as for `write_report`.
        values: of the report that `write_report` has just written.
        added: replace those of the same name.
        folder: with the report.

    Raises:
        ResultError: the report cannot be written.
    """
    whole: JsonObject = json.loads(json.dumps({**values, **added}, sort_keys=True))
    _write(opened, whole, _page(whole), folder)
    return whole


def _write(opened: OpenedResults, values: JsonMapping, html: str, folder: Path) -> None:
    commands = [_without_places(command) for command in values["commands"]]
    write_json(folder / REPORT_FILE, opened.with_checksum({**values, "commands": commands}))
    if html:
        write_text(folder / REPORT_PAGE, html)


def _without_places(command: str) -> str:
    """Return a command without the folder of its results, and with only the names of files
    outside the working directory: equal runs have equal files.

    >>> _without_places("quantizer merge a /b/c --model /d/m.py:small --output e")
    'quantizer merge a c --model m.py:small'
    """
    words = without_places(shlex.split(command))
    return shlex.join(Path(word).name if os.path.isabs(word) else word for word in words)


def _page(values: JsonMapping) -> str:
    page = _function("page")
    return "" if page is None else str(page(values))


def _function(name: str) -> Any:
    """Return what a plug-in has for reports by this name; None if none has it."""
    places = {name: place for plugin in plugins() for name, place in plugin.report.items()}
    return loaded(places[name]) if name in places else None


def shown_by_plugin(name: str) -> Any:
    """Return the function of a plug-in that shows reports, as `Plugin.report` has it.

    Raises:
        UsageError: no plug-in has one.
    """
    function = _function(name)
    if function is None:
        why = f"no plug-in is there that makes the {name} of a report"
        raise UsageError(why, help=remedy_for_absent("page"))
    return function
