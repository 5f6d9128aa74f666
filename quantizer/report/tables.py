"""Make rows of plans, layers and damage, as tables for the terminal and as files."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quantizer.comparison.output_figures import OutputFigures
from quantizer.config.model import QuantizationSpec
from quantizer.evaluation.compare import LayerNoise, NetworkComparison
from quantizer.evaluation.output_warnings import OutputWarning
from quantizer.evaluation.pass_loss import PassLoss
from quantizer.graph.ir import Graph, Node
from quantizer.graph.output_parts import Output
from quantizer.plan.model import Plan
from quantizer.report.view import Listing, View
from quantizer.sources.directions import BY_NAME, Directions

_BAR = 20
"""Characters of a full bar."""
_LOSSLESS_DB = 144.0
"""Noise this far below a signal is less than float32 resolves with its 24 bits."""


def layer_rows(
    comparison: NetworkComparison, specs: Mapping[tuple[str, str], QuantizationSpec]
) -> list[dict[str, Any]]:
    """Return a row per quantized tensor, that with the lowest local SQNR first."""
    rows = [_row(noise, specs[noise.layer, noise.role]) for noise in comparison.layers]
    return sorted(rows, key=lambda row: (row["local_sqnr_db"], row["layer"], row["tensor"]))


def report(
    metrics: Mapping[str, float],
    pairs: Mapping[str, Mapping[str, float]],
    rows: list[dict[str, Any]],
    stamp: str | None,
    passes: PassLoss | None = None,
    *,
    outputs: Iterable[OutputFigures] = (),
    warnings: Iterable[OutputWarning] = (),
    directions: Directions = BY_NAME,
) -> dict[str, Any]:
    """Return the figures of a test for programs, with infinite ones as null.

    Args:
        metrics: of the quantized network against the float one.
        pairs: metrics of the task, of both networks.
        rows: what `layer_rows` returns.
        stamp: marks results that say nothing about real data.
        passes: what passes before quantization cost.
        outputs: figures of each output and part.
        warnings: on outputs that are lost.
        directions: whether less or more of a metric is better.
    """
    values: dict[str, Any] = {"metrics": _finite_row(metrics)}
    if pairs:
        values["pairs"] = {name: _finite_row(pair) for name, pair in pairs.items()}
    declared = directions.declared_of(pairs)
    if declared:
        values["lower_is_better"] = declared
    values["outputs"] = output_rows(outputs)
    values["warnings"] = [warning.to_json() for warning in warnings]
    if passes is not None:
        values["passes"] = passes.to_json()
    values["layers"] = [_finite_row(row) for row in rows]
    if stamp:
        values["stamp"] = stamp
    return values


def _finite_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: finite(value) for name, value in row.items()}


def output_rows(outputs: Iterable[OutputFigures]) -> list[dict[str, Any]]:
    """Return the figures of each output and part for programs, with infinite ones as null."""
    rows: list[dict[str, Any]] = []
    for output in outputs:
        for part in output.rows:
            row = _finite_row(part.to_json())
            row["output"] = output.whole.name
            if part is output.whole and output.order is not None:
                row["rows"] = output.order.to_json()
            rows.append(row)
    return rows


def named_outputs(outputs: Iterable[Output]) -> list[dict[str, Any]]:
    """Return the names of outputs and of their parts before a run, for programs."""
    rows: list[dict[str, Any]] = []
    for output in outputs:
        parts: list[dict[str, Any]] = []
        if len(output.parts) > 1:
            for part in output.parts:
                names = ("name", "index", "layer", "pooled")
                parts.append({name: getattr(part, name) for name in names})
        rows.append({"name": output.name, "parts": parts})
    return rows


def output_lines(outputs: Iterable[Output]) -> Iterator[str]:
    """Yield a line on each output with the names that gates take (`sqnr_db[0.scores]>=30`)."""
    for output in outputs:
        words: list[str] = []
        for part in output.parts:
            names = dict.fromkeys((part.name, part.index or part.name))
            pooled = f" ({part.pooled} sources together)" if part.pooled > 1 else ""
            words.append(f"{' or '.join(names)}{pooled}")
        if len(words) == 1:
            yield f"output {output.name}"
        else:
            yield f"output {output.name}, in {len(words)} parts: {', '.join(words)}"


def output_table(rows: Sequence[Mapping[str, Any]], view: View) -> Listing:
    """Return the figures of outputs and parts for people; `rows` are those of `output_rows`."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        figures = [_db(row["sqnr_db"]), _digits(row["cosine"]), _digits(row["equal"])]
        name = row["name"] if row["pooled"] == 1 else f"{row['name']} ({row['pooled']} sources)"
        lines.append((row["layer"], name, row["index"] or "", row["kind"], *figures))
    titles = ("layer", "output", "index", "kind", "dB", "cosine", "equal")
    order = ("output", "index", "kind", "dB", "cosine", "equal", "layer")
    return view.listing(
        titles,
        lines,
        [row["sqnr_db"] for row in rows],
        numbers=titles[4:],
        layouts=(order, order[:-1]),
        what="output",
        idle="without an SQNR",
        also=", and report.json has them all",
    )


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Return layers.csv, with a header line."""
    out = io.StringIO()
    names = list(rows[0]) if rows else ["layer"]
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def describe_spec(spec: QuantizationSpec) -> str:
    """Return a spec in one line: number format, granularity, range method and rounding.

    What is usual is left out.

    >>> describe_spec(QuantizationSpec(qscheme="per_channel", ch_axis=0))
    'int8 per_channel maxmin half_even'
    >>> describe_spec(
    ...     QuantizationSpec(dtype="fp4", qscheme="per_group", group_size=32, scale_type="e8m0")
    ... )
    'fp4 per_group 32 e8m0 floor'
    >>> describe_spec(
    ...     QuantizationSpec(dtype="fp4", qscheme="per_group", group_size=16, scale_type="e4m3")
    ... )
    'fp4 per_group 16 e4m3 maxmin'
    """
    if not spec.is_scaled:
        return spec.dtype
    is_integer = spec.dtype == "int"
    name = spec.dtype
    if is_integer:
        is_signed = spec.signed and spec.symmetric
        name = f"{'int' if is_signed else 'uint'}{spec.bit_width}"
    words = [name, spec.qscheme]
    if spec.qscheme == "per_group" and spec.group_size != -1:
        words.append(str(spec.group_size))
    if spec.is_dynamic:
        words.append("dynamic")
    if spec.scale_type == "e8m0":
        return " ".join([*words, "e8m0", spec.scale_mode])
    if spec.scale_type == "microexponent":
        return " ".join(words)
    if spec.scale_type == "e4m3":
        words.append("e4m3")
    if not spec.is_dynamic:
        words.append(spec.method)
    if is_integer:
        words.append(spec.round_mode)
    if not spec.symmetric:
        words.append("asymmetric")
    if spec.has_symmetric_scale and spec.symmetric_scale == "half_range":
        words.append("half_range")
    if spec.scale_type == "poweroftwo":
        words.append("poweroftwo")
    return " ".join(words)


def finite(value: Any) -> Any:
    """Return the value, or None for a number that is infinite or undefined."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def damage_table(rows: Sequence[Mapping[str, Any]], view: View) -> Listing:
    """Return the quantized tensors, the most damaged first; `rows` are those of `layer_rows`.

    The bar is the tensor's own noise-to-signal ratio, relative to the worst one.
    """
    ratios = [10 ** (-row["local_sqnr_db"] / 10) for row in rows]
    worst = max(ratios, default=0.0)
    lines: list[tuple[str, ...]] = []
    ranks: list[float | None] = []
    for row, ratio in zip(rows, ratios, strict=True):
        spec, local_db = row["spec"], row["local_sqnr_db"]
        bar = ""
        if 0 < worst < math.inf:
            bar = "█" * round(_BAR * ratio / worst)
        number_format = spec.partition(" ")[0]
        figures = (_db(local_db), _db(row["accumulated_sqnr_db"]))
        lines.append((row["layer"], row["tensor"], spec, number_format, *figures, bar))
        ranks.append(local_db if local_db < _LOSSLESS_DB else None)
    titles = ("local dB", "accumulated dB")
    return view.listing(
        ("layer", "tensor", "spec", "format", *titles, "noise"),
        lines,
        ranks,
        numbers=titles,
        layouts=(
            ("layer", "tensor", "spec", *titles, "noise"),
            ("layer", "tensor", "spec", *titles),
            ("layer", "tensor", "format", *titles, "noise"),
            ("layer", "tensor", "format", *titles),
        ),
        what="tensor",
        idle="without loss",
        also=", and layers.csv has them all",
    )


def metric_table(metrics: Mapping[str, Mapping[str, float]]) -> Listing:
    """Return a line per metric: float, quantized, difference."""
    rows: list[tuple[str, ...]] = []
    for name, pair in metrics.items():
        before, after = pair["float"], pair["quantized"]
        rows.append((name, f"{before:.6g}", f"{after:.6g}", f"{after - before:+.6g}"))
    titles = ("metric", "float", "quantized", "change")
    return Listing(titles, rows, frozenset(titles[1:]))


def rule_table(plan: Plan) -> Listing:
    """Return how many layers and tensors each block of the config is about."""
    rows: list[tuple[str, ...]] = []
    for rule in plan.rules:
        rows.append((rule.label, rule.selector, str(len(rule.layers)), str(rule.took_effect)))
    titles = ("rule", "selector", "layers", "tensors")
    return Listing(titles, rows, frozenset(titles[2:]))


def plan_table(plan: Plan, view: View) -> Listing:
    """Return each tensor's spec, or why it stays float, in execution order."""
    rows: list[tuple[str, ...]] = []
    ranks: list[float | None] = []
    for node in plan.graph.nodes:
        for role, tensor in plan.of_layer(node.name).items():
            rows.append((node.name, role, describe_spec(tensor.spec)))
        for (name, role), place in plan.off.items():
            if name == node.name:
                rows.append((name, role, f"float: as {place} says"))
        for (name, role), reason in plan.ungrouped.items():
            if name == node.name:
                rows.append((name, role, f"float: {reason}"))
        ranks += [0.0] * (len(rows) - len(ranks))
        if node.name in plan.floats and node.row.kind != "structural":
            rows.append((node.name, "activation", why_float(plan.floats[node.name])))
            ranks.append(None)
    return view.listing(
        ("layer", "tensor", "spec"), rows, ranks, what="tensor", idle="in float"
    )


def refusal_table(rows: Iterable[tuple[str, str, str]], view: View) -> Listing:
    """Return the tensors that a target of `--deploy` cannot hold, and why."""
    return view.listing(("layer", "tensor", "reason"), list(rows), what="tensor")


def layer_table(
    graph: Graph, tensors: Iterable[tuple[str, str]], floats: Mapping[str, str], view: View
) -> Listing:
    """Return all layers with operator, output shape and quantized tensors.

    In the shape "b" is the batch. A layer without quantized tensors says why it is float.
    """
    roles: dict[str, list[str]] = {}
    for layer, role in tensors:
        roles.setdefault(layer, []).append(role)
    rows: list[tuple[str, ...]] = []
    ranks: list[float | None] = []
    for node in graph.nodes:
        quantized = ", ".join(roles.get(node.name, ()))
        if not quantized and node.name in floats:
            quantized = why_float(floats[node.name])
        rows.append((node.name, node.op, shape_text(node), quantized))
        ranks.append(0.0 if node.name in roles else None)
    titles = ("layer", "operator", "output", "tensors")
    return view.listing(titles, rows, ranks, idle="in float")


def why_float(reason: str) -> str:
    """Return why a layer's output is not quantized, as a table says it.

    >>> why_float("computed in float"), why_float("quantized at relu")
    ('float: computed in float', 'quantized at relu')
    """
    return reason if reason.startswith("quantized at") else f"float: {reason}"


def shape_text(node: Node) -> str:
    """Return the shape of an output as text: `bx3x8x8` for one of any batch size."""
    if node.shape is None:
        return ""
    sizes = ["b" if size is None else str(size) for size in node.shape]
    return "x".join(sizes)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _row(noise: LayerNoise, spec: QuantizationSpec) -> dict[str, Any]:
    accumulated = noise.accumulated
    return {
        "layer": noise.layer,
        "tensor": noise.role,
        "spec": describe_spec(spec),
        "local_sqnr_db": noise.local.sqnr_db,
        "accumulated_sqnr_db": accumulated.sqnr_db if accumulated else None,
        "cosine": accumulated.cosine if accumulated else noise.local.cosine,
    }
