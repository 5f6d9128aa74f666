"""Read report.json: the names of layers, the order of rows, the worst tensor and output, and
the lines on what a test has measured.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantizer.comparison.samples import worst_words
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.wording import counted, first_names, named_output
from quantizer.evaluation.output_warnings import NOTES
from quantizer.report.next_step import (
    hides_samples,
    judged_db,
    leaf_rows,
    measured_parts,
    relative_loss,
)
from quantizer.report.tables import LOSSLESS_DB, number_text


@dataclass(frozen=True)
class Bounds:
    """Below which local SQNR in dB a tensor is marked as low, or as poor."""

    low_db: float
    poor_db: float


_BOUNDS_BY_WIDTH = {2: Bounds(3, 0), 3: Bounds(5, 2), 4: Bounds(10, 5), 6: Bounds(18, 10)}
"""The bounds of tensors of up to so many bits. A bit is worth 6 dB, so that 20 dB is usual for
4 bits and a loss for 8.
"""
_BOUNDS = Bounds(25, 15)
"""The bounds of wider tensors."""
LOW = "low"
POOR = "poor"
PASS = "PASS"
FAIL = "FAIL"
NOT_JUDGED = "NOT JUDGED"


def bounds_of(bits: int) -> Bounds:
    """Return the bounds of tensors of a width.

    >>> bounds_of(4), bounds_of(8)
    (Bounds(low_db=10, poor_db=5), Bounds(low_db=25, poor_db=15))
    """
    for width, bounds in _BOUNDS_BY_WIDTH.items():
        if bits <= width:
            return bounds
    return _BOUNDS


def layer_name(content: JsonMapping, layer: str) -> str:
    """Return the module path of a layer, which the page shows as its name."""
    paths = content["paths"]
    return str(paths.get(layer, layer))


def tensor_name(content: JsonMapping, row: JsonMapping) -> str:
    """Return the name of a tensor with that of its layer."""
    layer = layer_name(content, row["layer"])
    return f"{row['tensor']} of {layer}"


def most_damaged(rows: Iterable[JsonObject]) -> JsonObject | None:
    """Return the tensor with the lowest local SQNR, or None if none was measured."""
    measured = [row for row in rows if row["local_sqnr_db"] is not None]
    return min(measured, key=lambda row: row["local_sqnr_db"], default=None)


def rows_in_order(content: JsonMapping) -> list[JsonObject]:
    """Return the tensors in the order of execution."""
    return sorted(content["layers"], key=lambda row: row["order"])


def severity(row: JsonMapping) -> str:
    """Return how low the local SQNR of a tensor is for its width: `LOW`, `POOR` or "".

    >>> severity({"local_sqnr_db": 14.6, "bits": 4}), severity({"local_sqnr_db": 14.6})
    ('', 'poor')
    """
    sqnr_db = row["local_sqnr_db"]
    bounds = bounds_of(row.get("bits", 8))
    if sqnr_db is None or sqnr_db >= bounds.low_db:
        return ""
    return POOR if sqnr_db < bounds.poor_db else LOW


def is_lossless(content: JsonMapping, row: JsonMapping) -> bool:
    """Return whether a test has found no loss in a tensor. JSON has no infinite SQNR."""
    if not content["metrics"]:
        return False
    sqnr_db = row["local_sqnr_db"]
    return sqnr_db is None or sqnr_db >= LOSSLESS_DB


def value_text(value: Any) -> str:
    """Return a value of JSON as text."""
    if isinstance(value, dict):
        texts = [f"{name}: {value_text(item)}" for name, item in value.items()]
    elif isinstance(value, list):
        texts = [value_text(item) for item in value]
    else:
        texts = [str(value)]
    return ", ".join(texts)


_MAX_METRICS = 3
_MAX_NAMES = 3
_MAX_REASONS = 3
_MOST_PERCENT = 200


def measured_lines(tested: JsonMapping) -> Iterator[str]:
    """Yield lines on the metrics of the task, the outputs, and on what they were measured.

    Args:
        tested: the content of report.json.
    """
    lines = [*_metrics(tested), *_outputs(tested)]
    if lines and tested.get("judged_on"):
        lines[0] = f"{lines[0][:-1]}; measured {tested['judged_on']['text']}."
    yield from lines
    if tested.get("stamp"):
        yield f"These figures are of {tested['stamp']}."
    if tested.get("calibration_stamp"):
        yield f"The network was calibrated on {tested['calibration_stamp']}."


def judgement(gates: Sequence[str], *, is_failed: bool) -> str:
    """Return the line that a verdict begins with.

    Args:
        gates: a line for each gate.
        is_failed: whether a gate does not hold, or there is an error.

    >>> judgement([], is_failed=False)
    'NOT JUDGED: no --gate says what has to hold.'
    """
    if is_failed:
        is_missed = any(": not met" in line for line in gates)
        texts = [*gates] if is_missed else ["the error below says why", *gates]
        return f"{FAIL}: {'; '.join(texts)}" + ("" if gates else ".")
    if gates:
        return f"{PASS}: {'; '.join(gates)}"
    return f"{NOT_JUDGED}: no --gate says what has to hold."


def warning_lines(tested: JsonMapping) -> Iterator[str]:
    """Yield the first warning about an output that has lost, with the number of others."""
    silent = (*NOTES, "samples")
    texts = [row["text"] for row in tested.get("warnings", ()) if row["kind"] not in silent]
    if not texts:
        return
    text = f"Warning: {texts[0]}"
    if len(texts) > 1:
        text += f"; {counted(len(texts) - 1, 'more warning')} in the report"
    yield f"{text}."


def float_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a line on layers with weights that stay in float, with the commonest reasons."""
    layers_by_reason: dict[str, list[str]] = {}
    for layer, reason in reasons.items():
        layers_by_reason.setdefault(reason, []).append(layer)
    if not layers_by_reason:
        return
    groups = sorted(layers_by_reason.items(), key=lambda item: -len(item[1]))
    texts: list[str] = []
    others = len(reasons)
    for reason, layers in groups[:_MAX_REASONS]:
        texts.append(f"{first_names(layers, _MAX_NAMES)} ({reason})")
        others -= len(layers)
    if others:
        texts.append(f"and {counted(others, 'layer')} for other reasons")
    yield f"In float: {'; '.join(texts)}."


def _metrics(tested: JsonMapping) -> Iterator[str]:
    """Yield a line on the metrics of the task, those with the largest loss first."""
    pairs = tested.get("pairs", {})
    names = sorted(pairs, key=lambda name: -relative_loss(tested, name))
    texts = []
    for name in names[:_MAX_METRICS]:
        before, after = pair_texts(pairs[name])
        texts.append(f"{name} is {after}, in float {before}")
    more = len(names) - len(texts)
    if more > 0:
        texts.append(f"{more} more with a smaller loss are in the report")
    if texts:
        yield f"{'; '.join(texts)}."


def pair_texts(pair: JsonMapping) -> tuple[str, str]:
    """Return a metric of the float and of the quantized network as texts."""
    before, after = (
        number_text(pair[name], ".4g", missing="not finite") for name in ("float", "quantized")
    )
    return before, after


def _outputs(tested: JsonMapping) -> Iterator[str]:
    """Yield a line on the difference of the outputs from float."""
    rows = measured_parts(tested)
    count = len(leaf_rows(tested))
    texts = []
    if rows and count == 1:
        texts.append(f"The output differs from float by {_error(rows[0])}")
    elif rows:
        worst = rows[0]
        name = named_output(worst["name"])
        outputs = counted(len({row["output"] for row in leaf_rows(tested)}), "output")
        if not outputs.startswith(f"{count} "):
            outputs = f"{count} parts of {outputs}"
        texts.append(f"Of {outputs}, {name} differs most from float, by {_error(worst)}")
        for row in rows[1 : 1 + _MAX_NAMES]:
            text = f"{named_output(row['name'])} by {_share(judged_db(row))}"
            if hides_samples(row):
                text += " on its worst samples"
            texts.append(text)
    for row in tested.get("outputs", ()):
        # Classes and indices have no SQNR
        if row["kind"] == "integer" and row["equal"] < 1:
            name = named_output(row["name"])
            texts.append(f"{row['equal']:.2%} of the values of {name} are equal")
        elif row["kind"] == "constant" and row["name"] == row["output"]:
            texts.append(f"{named_output(row['name'])} is constant in float")
    if texts:
        yield f"{'; '.join(texts)}."


def _error(row: JsonMapping) -> str:
    """Return the error of an output, such as "5 % (SQNR 26.0 dB)"; where its worst samples have
    much more, theirs first.
    """
    whole = f"{_share(row['sqnr_db'])} (SQNR {row['sqnr_db']:.1f} dB)"
    if not hides_samples(row):
        return whole
    text = f"{_share(judged_db(row))} ({judged_db(row):.1f} dB) on "
    text += worst_words(row["samples"]["count"])
    median_db = row["sqnr_db_median"]
    if median_db is not None:
        text += f", {_share(median_db)} ({median_db:.1f} dB) on the median one"
    return f"{text} and {whole} over all values"


def _share(sqnr_db: float) -> str:
    """Return the size of the error relative to the values.

    >>> _share(40.0), _share(26.0), _share(-3.0), _share(-43.0)
    ('1 %', '5 %', '141 %', '141 times its size')
    """
    share = 100 * 10 ** (-sqnr_db / 20)
    if share > _MOST_PERCENT:
        return f"{share / 100:.3g} times its size"
    if share < 0.01:
        return "less than 0.01 %"
    digits = 2 if share < 0.1 else 1
    if share >= 1:
        digits = 0
    return f"{share:.{digits}f} %"
