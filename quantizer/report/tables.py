"""Rows of plans, layers and damage, as tables for the terminal and as files. Printing is
`cli`'s business.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quantizer.comparison.output_figures import OutputFigures
from quantizer.config.model import QuantizationSpec
from quantizer.evaluation.compare import Comparison, LayerNoise
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
    comparison: Comparison, specs: Mapping[tuple[str, str], QuantizationSpec]
) -> list[dict[str, Any]]:
    """One row per quantized tensor, the most damaged first (lowest local SQNR; ties by
    name).
    """
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
    """What test mode found, infinite figures as null. `stamp` marks results that say nothing of
    real data.
    """
    found: dict[str, Any] = {"metrics": {key: finite(value) for key, value in metrics.items()}}
    if pairs:
        found["pairs"] = {
            name: {kind: finite(value) for kind, value in pair.items()}
            for name, pair in pairs.items()
        }
    declared = directions.declared_of(pairs)
    if declared:
        found["lower_is_better"] = declared
    found["outputs"] = output_rows(outputs)
    found["warnings"] = [warning.to_json() for warning in warnings]
    if passes is not None:
        found["passes"] = passes.to_json()
    found["layers"] = [{key: finite(value) for key, value in row.items()} for row in rows]
    return found | {"stamp": stamp} if stamp else found


def output_rows(outputs: Iterable[OutputFigures]) -> list[dict[str, Any]]:
    """Return the figures of each output and of its parts, for programs; infinite ones as
    null.
    """
    rows: list[dict[str, Any]] = []
    for output in outputs:
        for part in output.rows:
            row = {key: finite(value) for key, value in part.to_json().items()}
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
        for part in output.parts:
            parts.append(
                {
                    "name": part.name,
                    "index": part.index,
                    "layer": part.layer,
                    "pooled": part.pooled,
                }
            )
        rows.append({"name": output.name, "parts": parts if len(parts) > 1 else []})
    return rows


def output_lines(outputs: Iterable[Output]) -> Iterator[str]:
    """Yield a line on each output: the names that gates may have, as in
    `sqnr_db[0.scores]>=30`.
    """
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
    """layers.csv, with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(
        out, fieldnames=list(rows[0]) if rows else ["layer"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def describe_spec(spec: QuantizationSpec) -> str:
    """The number format, its scales, how their range is found and the rounding, in one line;
    what is usual is left out.

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
    integer = spec.dtype == "int"
    name = (
        f"{'int' if spec.signed and spec.symmetric else 'uint'}{spec.bit_width}"
        if integer
        else spec.dtype
    )
    words = [name, spec.qscheme]
    words += (
        [str(spec.group_size)] if spec.qscheme == "per_group" and spec.group_size != -1 else []
    )
    words += ["dynamic"] if spec.is_dynamic else []
    if spec.scale_type == "e8m0":
        return " ".join([*words, "e8m0", spec.scale_mode])
    if spec.scale_type == "microexponent":
        return " ".join(words)
    words += ["e4m3"] if spec.scale_type == "e4m3" else []
    words += [] if spec.is_dynamic else [spec.method]
    words += [spec.round_mode] if integer else []
    words += ["asymmetric"] if not spec.symmetric else []
    words += (
        ["half_range"]
        if spec.has_symmetric_scale and spec.symmetric_scale == "half_range"
        else []
    )
    words += ["poweroftwo"] if spec.scale_type == "poweroftwo" else []
    return " ".join(words)


def finite(value: Any) -> Any:
    """The value, or None for infinite and undefined figures."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def damage_table(rows: Sequence[Mapping[str, Any]], view: View) -> Listing:
    """The quantized tensors, the most damaged first; `rows` are those of `layer_rows`.

    The bar is the tensor's own noise-to-signal ratio against the worst one's.
    """
    ratios = [10 ** (-row["local_sqnr_db"] / 10) for row in rows]
    worst = max(ratios, default=0.0)
    lines = [
        (
            row["layer"],
            row["tensor"],
            row["spec"],
            row["spec"].partition(" ")[0],
            _db(row["local_sqnr_db"]),
            _db(row["accumulated_sqnr_db"]),
            "█" * round(_BAR * ratio / worst) if 0 < worst < math.inf else "",
        )
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    *figures, bar = "local dB", "accumulated dB", "noise"
    layouts = tuple(
        ("layer", "tensor", spec, *figures, *bars)
        for spec in ("spec", "format")
        for bars in ((bar,), ())
    )
    return view.listing(
        ("layer", "tensor", "spec", "format", *figures, bar),
        lines,
        [row["local_sqnr_db"] if row["local_sqnr_db"] < _LOSSLESS_DB else None for row in rows],
        numbers=tuple(figures),
        layouts=layouts,
        what="tensor",
        idle="without loss",
        also=", and layers.csv has them all",
    )


def metric_table(metrics: Mapping[str, Mapping[str, float]]) -> Listing:
    """One line per metric: float, quantized, difference."""
    rows = [
        (
            name,
            f"{v['float']:.6g}",
            f"{v['quantized']:.6g}",
            f"{v['quantized'] - v['float']:+.6g}",
        )
        for name, v in metrics.items()
    ]
    titles = ("metric", "float", "quantized", "change")
    return Listing(titles, rows, frozenset(titles[1:]))


def rule_table(plan: Plan) -> Listing:
    """What each block of the config found."""
    rows = [
        (rule.label, rule.selector, str(len(rule.layers)), str(rule.took_effect))
        for rule in plan.rules
    ]
    return Listing(
        ("rule", "selector", "layers", "tensors"), rows, frozenset(("layers", "tensors"))
    )


def plan_table(plan: Plan, view: View) -> Listing:
    """Each tensor's spec, or why it stays float, in execution order."""
    rows: list[tuple[str, ...]] = []
    ranks: list[float | None] = []
    for node in plan.graph.nodes:
        said = [
            (role, describe_spec(tensor.spec))
            for role, tensor in plan.of_layer(node.name).items()
        ]
        said += [
            (role, f"float: as {at} says")
            for (name, role), at in plan.off.items()
            if name == node.name
        ]
        said += [
            (role, f"float: {why}")
            for (name, role), why in plan.ungrouped.items()
            if name == node.name
        ]
        rows += [(node.name, *each) for each in said]
        ranks += [0.0] * len(said)
        if node.name in plan.floats and node.row.kind != "structural":
            rows.append((node.name, "activation", why_float(plan.floats[node.name])))
            ranks.append(None)
    return view.listing(
        ("layer", "tensor", "spec"), rows, ranks, what="tensor", idle="in float"
    )


def refusal_table(rows: Iterable[tuple[str, str, str]], view: View) -> Listing:
    """Layer, tensor, and why a target of `--deploy` cannot hold it."""
    return view.listing(("layer", "tensor", "reason"), list(rows), what="tensor")


def layer_table(
    graph: Graph, tensors: Iterable[tuple[str, str]], floats: Mapping[str, str], view: View
) -> Listing:
    """All layers: name, operator, output shape ("b" is the batch), quantized tensors, else why
    the output is float.
    """
    roles: dict[str, list[str]] = {}
    for layer, role in tensors:
        roles.setdefault(layer, []).append(role)
    rows = []
    for node in graph.nodes:
        why = why_float(floats[node.name]) if node.name in floats else ""
        rows.append(
            (node.name, node.op, shape_text(node), ", ".join(roles.get(node.name, ())) or why)
        )
    ranks = [0.0 if node.name in roles else None for node in graph.nodes]
    return view.listing(
        ("layer", "operator", "output", "tensors"), rows, ranks, idle="in float"
    )


def why_float(reason: str) -> str:
    """Why a layer's output is not quantized, as a table says it.

    >>> why_float("computed in float"), why_float("quantized at relu")
    ('float: computed in float', 'quantized at relu')
    """
    return reason if reason.startswith("quantized at") else f"float: {reason}"


def shape_text(node: Node) -> str:
    """`bx3x8x8` for an output of any batch size."""
    return (
        ""
        if node.shape is None
        else "x".join("b" if size is None else str(size) for size in node.shape)
    )


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
