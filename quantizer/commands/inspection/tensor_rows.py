"""Find which tensors of two results differ. The hierarchical form quantizes a value where a
layer reads it, and the layered form where it is made: these are one tensor.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.roles import base_role
from quantizer.graph.ir import Graph
from quantizer.plan.groups import layout
from quantizer.plan.layout import quantization_point
from quantizer.plan.model import Key, output_role
from quantizer.report.tables import number_text
from quantizer.report.view import Listing, TableView

SQNR = ("local_sqnr_db", "accumulated_sqnr_db")
"""The figures of a tensor that test mode measures."""


def tensors_at_outputs(graph: Graph, keys: Iterable[Key]) -> dict[Key, Key]:
    """Return for each input of a layer the tensor that quantizes its value where it is made."""
    of_inputs: dict[Key, str] = {}
    for name, role in keys:
        node = graph.by_name.get(name)
        if node is not None and node.op != "input" and base_role(role) == "input":
            value = node.input_roles().get(role)
            if value is not None:
                of_inputs[name, role] = value
    if not of_inputs:
        return {}
    where = layout(graph)
    found: dict[Key, Key] = {}
    for key, value in of_inputs.items():
        point = quantization_point(graph, where, value)
        if point is not None:
            found[key] = (point, output_role(graph.by_name[point]))
    return found


def differing_tensors(
    first: Mapping[Key, JsonMapping],
    second: Mapping[Key, JsonMapping],
    at_output: Mapping[Key, Key],
) -> Iterator[JsonObject]:
    """Yield a row for each tensor that differs, with both values of each entry that differs.

    Args:
        first: the tensors of the first side.
        second: those of the second.
        at_output: what `tensors_at_outputs` returns for both.
    """
    for key, other in _pairs(first, second, at_output):
        row = _named(key)
        if key not in first or other not in second:
            yield row | {"only_in": "first" if key in first else "second"}
            continue
        before, after = first[key], second[other]
        specs = _differing(before["spec"], after["spec"], after["spec"])
        values = _differing(before, after, ("scale", "zero_point", *SQNR))
        if key != other:
            row["in_second"] = _named(other)
        if specs or values:
            yield row | {"spec": specs} | values


def _pairs(
    first: Collection[Key], second: Collection[Key], at_output: Mapping[Key, Key]
) -> Iterator[tuple[Key, Key]]:
    """Yield what quantizes the same value on both sides, in the order of the first side. What
    only one side has is in a pair with itself.

    A tensor at an output is in a pair with each input that has no other.
    """
    paired: set[Key] = set()
    for key in first:
        others: list[Key] = []
        if key not in second:
            others = [other for other in second if at_output.get(other) == key]
            others.append(at_output.get(key, key))
            others = [other for other in others if other in second and other not in first]
        paired.update(others)
        for other in others or [key]:
            yield key, other
    for key in second:
        if key not in paired and key not in first:
            yield key, key


def _named(key: Key) -> JsonObject:
    """Return the layer and the role of a tensor as JSON."""
    return {"layer": key[0], "tensor": key[1]}


def _differing(before: JsonMapping, after: JsonMapping, names: Iterable[str]) -> JsonObject:
    """Return both values of each name whose values differ."""
    pairs = {name: [before.get(name), after.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def tensor_table(rows: Iterable[JsonMapping], view: TableView) -> Listing:
    """Return the tensors that differ. Those whose SQNR fell most are shown first."""
    lines = []
    ranks: list[float | None] = []
    for row in rows:
        local, accumulated = [_pair_text(row.get(name)) for name in SQNR]
        line = (
            row["layer"],
            row["tensor"],
            ", ".join(_changes(row, view)),
            _scale_ratios(row.get("scale")),
            local,
            accumulated,
        )
        lines.append(line)
        ranks.append(_sqnr_change(row))
    titles = ("layer", "tensor", "changed", "scale ratio", "local dB", "accumulated dB")
    return view.listing(titles, lines, ranks, numbers=titles[3:], what="tensor")


def _changes(row: JsonMapping, view: TableView) -> Iterator[str]:
    """Yield the changes of a tensor that no other column shows."""
    if "in_second" in row:
        layer, role = row["in_second"].values()
        yield f"in the second as {role} of {view.text(layer)}"
    if "only_in" in row:
        yield f"only in the {row['only_in']}"
    if "zero_point" in row and "scale" not in row:
        yield "zero point"
    for name, (before, after) in row.get("spec", {}).items():
        yield f"{name} {before} → {after}"


def _sqnr_change(row: JsonMapping) -> float:
    """Return the change of the accumulated SQNR, and 0 where it is not measured."""
    before, after = row.get("accumulated_sqnr_db", (None, None))
    if before is None or after is None:
        return 0.0
    return float(after - before)


def _pair_text(pair: Iterable[float | None] | None) -> str:
    """Return two values as text, or nothing if they do not differ."""
    if pair is None:
        return ""
    texts = [number_text(value, ".2f") for value in pair]
    return " → ".join(texts)


def _scale_ratios(pair: Iterable[Any] | None) -> str:
    """Return the factor by which a scale changed. For several scales, return the least and the
    largest factor.
    """
    if pair is None:
        return ""
    before, after = [value if isinstance(value, list) else [value] for value in pair]
    if len(before) != len(after):
        return "other scales"
    ratios = []
    for old, new in zip(before, after, strict=True):
        if not _is_scale(old) or not _is_scale(new):
            return "other scales"
        ratios.append(new / old)
    least = f"{min(ratios):.3f}"
    most = f"{max(ratios):.3f}"
    return least if least == most else f"{least} … {most}"


def _is_scale(value: Any) -> bool:
    return isinstance(value, (int, float)) and value != 0
