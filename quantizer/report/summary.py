"""Rows and files of a test run, from its comparison alone: nothing here runs a network."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import Any

from quantizer.config.model import QuantizationSpec
from quantizer.engine.evaluate import Comparison, LayerNoise

Specs = Mapping[tuple[str, str], QuantizationSpec]


def layer_rows(comparison: Comparison, specs: Specs) -> list[dict[str, Any]]:
    """One row per quantized tensor, the most damaged first (lowest local SQNR; ties by name)."""
    rows = [_row(noise, specs[noise.layer, noise.role]) for noise in comparison.layers]
    return sorted(rows, key=lambda row: (row["local_sqnr_db"], row["layer"], row["tensor"]))


def report(metrics: Mapping[str, float], rows: list[dict[str, Any]], stamp: str | None) -> dict[str, Any]:
    """report.json, infinite figures as null. `stamp` marks results that say nothing of real data."""
    found: dict[str, Any] = {"metrics": {key: finite(value) for key, value in metrics.items()}}
    found["layers"] = [{key: finite(value) for key, value in row.items()} for row in rows]
    return found | {"stamp": stamp} if stamp else found


def as_csv(rows: list[dict[str, Any]]) -> str:
    """layers.csv, with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["layer"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def describe_spec(spec: QuantizationSpec) -> str:
    """Number format, scales, how their range is found and rounding in one line; what is usual goes without saying.

    >>> describe_spec(QuantizationSpec(qscheme="per_channel", ch_axis=0))
    'int8 per_channel maxmin half_even'
    >>> describe_spec(QuantizationSpec(dtype="fp4", qscheme="per_group", group_size=32, scale_type="e8m0"))
    'fp4 per_group 32 e8m0 floor'
    """
    if not spec.is_scaled:
        return spec.dtype
    integer = spec.dtype == "int"
    name = f"{'int' if spec.signed and spec.symmetric else 'uint'}{spec.bit_width}" if integer else spec.dtype
    words = [name, spec.qscheme]
    words += [str(spec.group_size)] if spec.qscheme == "per_group" and spec.group_size != -1 else []
    words += ["dynamic"] if spec.is_dynamic else []
    if spec.scale_type == "e8m0":
        return " ".join([*words, "e8m0", spec.scale_mode])
    words += [] if spec.is_dynamic else [spec.method]
    words += [spec.round_mode] if integer else []
    words += ["asymmetric"] if not spec.symmetric else []
    words += ["poweroftwo"] if spec.scale_type == "poweroftwo" else []
    return " ".join(words)


def finite(value: Any) -> Any:
    """The value, or None for infinite and undefined figures."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
