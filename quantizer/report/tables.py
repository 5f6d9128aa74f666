"""Make the tables of plans, layers and their SQNR, for the terminal and for files."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mode
from typing import Any

from quantizer.comparison.output_figures import OutputFigures
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role
from quantizer.config.wording import first_names
from quantizer.evaluation.network_comparison import NetworkComparison
from quantizer.evaluation.scores import Scores
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import Key, Plan, TensorSpecs
from quantizer.report.view import TOP_REMEDY, Listing, TableRow, TableView
from quantizer.tables import SEARCHED

_BAR_WIDTH = 20
"""Characters of a full bar."""
_STATED = ("metrics", "outputs", "warnings", "layers")
"""The values of report.json that are there even if they are empty."""
_OUTPUT_FIGURES = (
    ("sqnr_db", ".2f"),
    ("sqnr_db_median", ".2f"),
    ("sqnr_db_worst", ".2f"),
    ("cosine", ".6g"),
    ("equal", ".6g"),
)
LOSSLESS_DB = 144.0
"""The SQNR of float32, whose significand has 24 bits. A tensor with a higher SQNR counts as not
damaged.
"""


def layer_rows(comparison: NetworkComparison, specs: TensorSpecs) -> list[JsonObject]:
    """Return a row for each quantized tensor, sorted by local SQNR, the lowest first."""
    rows: list[JsonObject] = []
    for noise in comparison.layers:
        accumulated = noise.accumulated
        row = {
            "layer": noise.layer,
            "tensor": noise.role,
            "spec": describe_spec(specs[noise.layer, noise.role]),
            "local_sqnr_db": noise.local.sqnr_db,
            "accumulated_sqnr_db": None if accumulated is None else accumulated.sqnr_db,
            "cosine": noise.cosine,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (row["local_sqnr_db"], row["layer"], row["tensor"]))


def figures_by_tensor(tested: JsonMapping) -> dict[Key, JsonObject]:
    """Return the tensors of a test by layer and role.

    Args:
        tested: what `report_values` returns for a test, or an empty dict without a test.
    """
    return {(row["layer"], row["tensor"]): row for row in tested.get("layers", ())}


def report_values(
    scores: Scores,
    rows: Iterable[JsonMapping],
    stamp: str | None,
    calibration_stamp: str | None = None,
) -> JsonObject:
    """Return the figures of a test as report.json has them. JSON has no infinity: infinite
    figures are None.

    Args:
        scores: of the quantized network compared with the float one.
        rows: what `layer_rows` returns.
        stamp: what the figures are of, such as "random data"; None if the data are real.
        calibration_stamp: the same of the data of the calibration.
    """
    values: JsonObject = {
        "metrics": finite_row(scores.metrics),
        "pairs": {name: finite_row(pair) for name, pair in scores.pairs.items()},
        "lower_is_better": scores.directions.to_json(scores.pairs),
        "outputs": output_rows(scores.comparison.outputs),
        "inputs": [row.to_json() for row in scores.comparison.inputs],
        "warnings": [warning.to_json() for warning in scores.warnings],
        "passes": None if scores.passes is None else scores.passes.to_json(),
        "layers": [finite_row(row) for row in rows],
        "judged_on": dict(scores.judged_on),
        "stamp": stamp,
        "calibration_stamp": calibration_stamp,
    }
    return {name: value for name, value in values.items() if value or name in _STATED}


def finite_row(row: JsonMapping) -> JsonObject:
    """Return figures by name, with None instead of infinite and undefined numbers."""
    return {name: finite_or_none(value) for name, value in row.items()}


def output_rows(outputs: Iterable[OutputFigures]) -> list[JsonObject]:
    """Return the figures of each output and part as report.json has them."""
    rows = []
    for output in outputs:
        for part in output.rows:
            row = finite_row(part.to_json())
            row["output"] = output.whole.name
            if part is output.whole and output.order is not None:
                row["rows"] = output.order.to_json()
            rows.append(row)
    return rows


def output_table(rows: Sequence[JsonMapping], view: TableView) -> Listing:
    """Return a table of the figures of outputs and parts.

    Args:
        rows: what `output_rows` returns.
        view: what to show.
    """
    lines = []
    for row in rows:
        name = row["name"]
        if row["pooled"] != 1:
            name += f" ({row['pooled']} sources)"
        line = (
            row["layer"],
            name,
            row["index"] or "",
            row["kind"],
            *(number_text(row[name], form) for name, form in _OUTPUT_FIGURES),
        )
        lines.append(line)
    figures = ("dB", "median dB", "worst dB", "cosine", "equal")
    titles = ("layer", "output", "index", "kind", *figures)
    without_layer = titles[1:]
    return view.listing(
        titles,
        lines,
        [row["sqnr_db"] for row in rows],
        numbers=figures,
        layouts=((*without_layer, "layer"), without_layer),
        what="output",
        idle="without an SQNR",
        file="report.json",
    )


def as_csv(rows: Sequence[JsonMapping]) -> str:
    """Return rows as CSV, the content of layers.csv, with a header line."""
    file = io.StringIO()
    names = list(rows[0]) if rows else ["layer"]
    writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def describe_spec(spec: QuantizationSpec) -> str:
    """Return a spec in one line: number format, granularity, range method and rounding.

    Settings with their usual values are left out.

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
    if spec.dtype in SEARCHED:
        return f"{spec.dtype} {spec.method}"
    words = [spec.dtype, spec.qscheme]
    if is_integer:
        letters = "int" if spec.has_signed_codes else "uint"
        words[0] = f"{letters}{spec.bit_width}"
    if spec.has_groups and spec.group_size != -1:
        words.append(str(spec.group_size))
    if spec.is_dynamic:
        words.append("dynamic")
    if spec.is_dynamic == "local":
        words.append("local")
    if spec.scale_type == "e8m0":
        words += ["e8m0", spec.scale_mode]
        return " ".join(words)
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
    if spec.has_symmetric_scale and spec.symmetric_scale != "quant_max":
        words.append(spec.symmetric_scale)
    if spec.scale_type == "poweroftwo":
        words.append("poweroftwo")
    return " ".join(words)


def finite_or_none(value: Any) -> Any:
    """Return the value, or None for a number that is infinite or undefined."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def usual_specs(rows: Iterable[JsonMapping]) -> dict[str, str]:
    """Return the most frequent spec of each kind of tensor."""
    specs: dict[str, list[str]] = {}
    for row in rows:
        specs.setdefault(base_role(row["tensor"]), []).append(row["spec"])
    return {kind: mode(found) for kind, found in specs.items()}


def usual_text(usual: Mapping[str, str]) -> str:
    """Return the usual specs in one line, each once.

    >>> usual_text({"input": "int8 maxmin", "weights": "int4 mse", "activation": "int8 maxmin"})
    'input, activation: int8 maxmin; weights: int4 mse'
    """
    kinds: dict[str, list[str]] = {}
    for kind, spec in usual.items():
        kinds.setdefault(spec, []).append(kind)
    return "; ".join(f"{', '.join(found)}: {spec}" for spec, found in kinds.items())


def format_text(row: JsonMapping, usual: Mapping[str, str]) -> str:
    """Return the number format of a tensor, or all words of its spec if it is not the usual
    one.
    """
    spec = str(row["spec"])
    return spec.partition(" ")[0] if spec == usual[base_role(row["tensor"])] else spec


def damage_table(rows: Sequence[JsonMapping], view: TableView) -> Listing:
    """Return a table of quantized tensors, the most damaged first. `usual_text` has what its
    formats leave out.

    The length of a bar is the noise-to-signal ratio of the tensor alone, relative to the worst
    one.

    Args:
        rows: what `layer_rows` returns.
        view: what to show.
    """
    noise_ratios = [10 ** (-row["local_sqnr_db"] / 10) for row in rows]
    worst = max(noise_ratios, default=0.0)
    usual = usual_specs(rows)
    lines = []
    for row, noise_ratio in zip(rows, noise_ratios, strict=True):
        width = round(_BAR_WIDTH * noise_ratio / worst) if 0 < worst < math.inf else 0
        line = (
            row["layer"],
            row["tensor"],
            format_text(row, usual),
            number_text(row["local_sqnr_db"], ".2f"),
            number_text(row["accumulated_sqnr_db"], ".2f"),
            "█" * width,
        )
        lines.append(line)
    figures_db = [row["local_sqnr_db"] for row in rows]
    ranks = [figure if figure < LOSSLESS_DB else None for figure in figures_db]
    figures = ("local dB", "accumulated dB")
    without_bars = ("layer", "tensor", "format", *figures)
    titles = (*without_bars, "noise")
    return view.listing(
        titles,
        lines,
        ranks,
        numbers=figures,
        layouts=(titles, without_bars),
        what="tensor",
        idle="without loss",
        file="layers.csv",
    )


def metric_table(metrics: Mapping[str, Mapping[str, float]]) -> Listing:
    """Return a line per metric: float, quantized, difference."""
    rows = []
    for name, pair in metrics.items():
        before, after = pair["float"], pair["quantized"]
        rows.append((name, f"{before:.6g}", f"{after:.6g}", f"{after - before:+.6g}"))
    titles = ("metric", "float", "quantized", "change")
    return Listing(titles, rows, frozenset(titles[1:]))


def rule_table(plan: Plan, view: TableView) -> Listing:
    """Return how many layers and tensors each block of the config is about."""
    rows = [
        (rule.label, rule.selector, str(len(rule.layers)), str(rule.took_effect))
        for rule in plan.rules
    ]
    titles = ("rule", "selector", "layers", "tensors")
    # The first column has no layers to choose from
    every = replace(view, layers=None, remedy=TOP_REMEDY)
    return every.listing(titles, rows, numbers=titles[2:], what="rule")


def layer_table(
    graph: Graph, tensors: Iterable[Key], floats: Mapping[str, str], view: TableView
) -> Listing:
    """Return all layers with operator, output shape and quantized tensors.

    In the shape "b" is the batch. A layer without quantized tensors says why it is float.
    """
    roles: dict[str, list[str]] = {}
    for layer, role in tensors:
        roles.setdefault(layer, []).append(role)
    rows = []
    for node in graph.nodes:
        quantized = ", ".join(roles.get(node.name, ()))
        if not quantized and node.name in floats:
            quantized = why_float(floats[node.name])
        rows.append((node.name, node.op, shape_text(node), quantized))
    ranks = [0.0 if node.name in roles else None for node in graph.nodes]
    titles = ("layer", "operator", "output", "tensors")
    return view.listing(titles, rows, ranks, idle="in float")


def plan_table(plan: Plan, view: TableView) -> Listing:
    """Return each tensor's spec, or why it stays float, in execution order."""
    reasons = [(key, f"as {place} says") for key, place in plan.off.items()]
    reasons += plan.ungrouped.items()
    rows_in_float: dict[str, list[TableRow]] = {}
    for (layer, role), reason in reasons:
        row = (layer, role, f"float: {reason}")
        rows_in_float.setdefault(layer, []).append(row)
    rows: list[TableRow] = []
    ranks: list[float | None] = []
    for node in plan.graph.nodes:
        for role, tensor in plan.of_layer(node.name).items():
            rows.append((node.name, role, describe_spec(tensor.spec)))
        rows += rows_in_float.get(node.name, [])
        ranks += [0.0] * (len(rows) - len(ranks))
        if node.name in plan.floats and node.row.kind != "structural":
            rows.append((node.name, "activation", why_float(plan.floats[node.name])))
            ranks.append(None)
    titles = ("layer", "tensor", "spec")
    return view.listing(titles, rows, ranks, what="tensor", idle="in float")


def format_counts(plan: Plan) -> str:
    """Return how many tensors of each role have each number format, as a sentence's part.

    Example: "15 activation uint8, 10 weights int8, 10 bias int32, 1 input uint8".
    """
    counts: Counter[tuple[str, str]] = Counter()
    for (_, role), tensor in plan.tensors.items():
        number_format = describe_spec(tensor.spec).partition(" ")[0]
        counts[base_role(role), number_format] += 1
    return first_names([f"{count} {' '.join(words)}" for words, count in counts.most_common()])


def why_float(reason: str) -> str:
    """Return why the output of a layer is not quantized, as tables show it.

    >>> why_float("computed in float"), why_float("quantized at relu")
    ('float: computed in float', 'quantized at relu')
    """
    return reason if reason.startswith("quantized at") else f"float: {reason}"


def shape_text(node: Node) -> str:
    """Return the shape of an output as text, with b for the batch size: `bx3x8x8`."""
    return "x".join("b" if size is None else str(size) for size in node.shape or ())


def number_text(value: float | None, form: str, missing: str = "") -> str:
    """Return a number formatted by `form`, or `missing` if it is None."""
    return missing if value is None else format(value, form)
