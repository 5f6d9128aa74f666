"""The result of a mode: metrics, lines to print, and the written files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.plan.model import Plan

if TYPE_CHECKING:
    from quantizer.export.agreement import Verification


@dataclass(frozen=True)
class Outcome:
    """The result of a mode.

    Attributes:
        metrics: those that gates may use.
        content: printed with --json.
        shown: printed otherwise.
        error: raised after everything is printed.
        report: the values of report.json, if there is one.
        plan: of a calibration.
        deployed: each written file with its comparison.
        exports: the same files, as report.json has them.
    """

    metrics: Mapping[str, float]
    content: JsonMapping
    shown: Sequence[RenderableType] = field(default=())
    error: Exception | None = None
    report: JsonObject = field(default_factory=dict)
    plan: Plan | None = None
    deployed: Mapping[Path, Verification] = field(default_factory=dict)
    exports: Sequence[JsonMapping] = ()


def metric_lines(metrics: dict[str, float]) -> list[RenderableType]:
    """Return a line for each metric."""
    return [f"{name} {value:.6g}" for name, value in metrics.items()]
