"""Returns what the report says about a written file: size, kernels, speed and engines."""

from pathlib import Path
from typing import Any

from quantizer.export.agreement import Verification
from quantizer.export.exporting import size_on_disk
from quantizer.export.kernels import Kernels
from quantizer.export.speed import Speed
from quantizer.export.targets import EXPORTERS


def export_summary(target: str, path: Path, verified: Verification) -> dict[str, Any]:
    """Return the facts about a verified file, as report.json has them.

    Args:
        target: the name of its target.
        path: of the file or folder.
        verified: its comparison with test mode.
    """
    summary: dict[str, Any] = {
        "file": path.name,
        "target": target,
        "bytes": size_on_disk(target, path),
        "checks": _checks(target, verified),
        "remarks": list(verified.remarks),
    }
    session = verified.default_session
    kernels = verified.used_kernels
    if kernels is not None:
        summary["kernels"] = _kernels(kernels)
    if session is not None and session.speed is not None:
        summary["speed"] = _speed(session.speed)
    return summary


def _kernels(kernels: Kernels) -> dict[str, Any]:
    return {
        "integer": len(kernels.integer),
        "count": kernels.count,
        "share": kernels.share,
        "multiply_add_share": kernels.multiply_add_share,
        "text": kernels.counted,
        "floating": kernels.floating,
        "is_run": kernels.is_run,
    }


def _speed(speed: Speed) -> dict[str, Any]:
    return {
        "ratio": speed.ratio,
        "low": speed.low,
        "high": speed.high,
        "rounds": speed.rounds,
        "is_clear": speed.is_clear,
        "text": speed.text,
    }


def _checks(target: str, verified: Verification) -> list[dict[str, Any]]:
    """Return a row for each engine that has run the file: whether it agrees with test mode, and
    the figures in words.
    """
    reader = EXPORTERS[target].reader
    session = verified.default_session
    rows: list[dict[str, Any]] = []
    if session is not None:
        sentences = [session.figures()]
        if session.kernels is not None:
            # The page has the lines on kernels and speed elsewhere
            first = len(session.kernels.summary_lines)
            sentences += session.summary_lines[first:]
        settings = "default settings"
        if session.kernels is not None and not session.kernels.is_run:
            settings = "without kernels of integers"
        rows.append(_agreeing(f"{reader}, {settings}", "; ".join(sentences)))
        reader = f"{reader}, {EXPORTERS[target].plainly}"
    rows.append(_agreeing(reader, verified.figures()))
    for check in verified.engines:
        row = {"engine": check.engine, "agrees": check.agrees, "text": check.line}
        rows.append(row)
    return rows


def _agreeing(engine: str, text: str) -> dict[str, Any]:
    """Return the row of an engine without whose agreement no file is written."""
    return {"engine": engine, "agrees": True, "text": text}
