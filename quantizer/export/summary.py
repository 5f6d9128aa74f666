"""Returns what the report says about a written file: size, kernels, speed and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizer.export import EXPORTERS, size_on_disk
from quantizer.export.agreement import Verification


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
        "bytes": size_on_disk(path),
        "checks": _checks(target, verified),
        "remarks": list(verified.remarks),
    }
    session = verified.default_session
    if session is None:
        return summary
    if session.kernels is not None:
        summary["kernels"] = {
            "integer": len(session.kernels.integer),
            "count": session.kernels.count,
            "share": session.kernels.share,
            "floating": session.kernels.floating,
        }
    if session.speed is not None:
        summary["speed"] = {**vars(session.speed), "text": session.speed.text}
    return summary


def _checks(target: str, verified: Verification) -> list[dict[str, Any]]:
    """Return a row for each engine that has run the file: whether it agrees with test mode, and
    the figures in words.
    """
    reader = EXPORTERS[target].reader
    rows: list[dict[str, Any]] = []
    session = verified.default_session
    if session is None:
        rows.append({"engine": reader, "agrees": True, "text": verified.figures()})
    else:
        sentences = [session.figures()]
        if session.kernels is not None:
            # The page has the lines on kernels and speed elsewhere
            sentences += session.summary_lines[len(session.kernels.summary_lines) :]
        by_default = f"{reader}, default settings"
        unchanged = f"{reader}, without optimizations"
        rows.append({"engine": by_default, "agrees": True, "text": "; ".join(sentences)})
        rows.append({"engine": unchanged, "agrees": True, "text": verified.figures()})
    for check in verified.engines:
        rows.append({"engine": check.engine, "agrees": check.agrees, "text": check.line})
    return rows
