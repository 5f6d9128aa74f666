"""Write the tables in docs/engine_results.md from the results of `make engines`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The program that writes the results is not part of the package.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from engines.table import ENGINES, NETWORKS, Engine

RESULTS = Path(__file__).parents[1] / "benchmarks" / "engines" / "results"
_NETWORK, _KEPT, _TEST_MODE, _FLOAT, _INTEGERS, _SPEED = _COLUMNS = (
    "network",
    "weights with codes and scales",
    "SQNR to test mode",
    "to float: engine, test mode",
    "in integers",
    "speed of float",
)
_BUSY = "The machine was busy when speeds were measured, so they are only a hint.\n"


def tables_of_engines() -> str:
    """Return a section for each engine: a row for each network, and what did not run."""
    sections = []
    is_quiet = True
    for engine in ENGINES:
        content = json.loads((RESULTS / f"{engine.name}.json").read_text("utf-8"))
        is_quiet = is_quiet and content["machine"]["is_quiet"]
        sections.append(_section(engine, content["rows"]))
    return "".join(["" if is_quiet else f"\n{_BUSY}", *sections])


def _section(engine: Engine, results: list[dict[str, Any]]) -> str:
    ran = [
        result for result in results if "cannot_hold" not in result and "failure" not in result
    ]
    version = ", ".join(sorted({result["version"] for result in ran}))
    rows = [_cells(result) for result in ran]
    columns = [name for name in _COLUMNS if any(row[name] for row in rows)]
    lines = [f"\n## {engine.title} {version}: `{_target(engine)}`\n\n"]
    lines.append(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n")
    for row in rows:
        lines.append(f"| {' | '.join(row[name] for name in columns)} |\n")
    notes = _names_by_reason(results)
    if notes:
        lines.append("\n")
    for reason, names in notes.items():
        lines.append(f"* {_listed(names)}: {reason}\n")
    return "".join(lines)


def _cells(result: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a network that an engine took, by column."""
    cells = dict.fromkeys(_COLUMNS, "")
    cells[_NETWORK] = NETWORKS[result["network"]]
    if "weights" in result:
        cells[_KEPT] = f"{result['kept']} of {result['weights']}"
        return cells
    cells[_TEST_MODE] = f"{result['sqnr_db']:.1f} dB" if "sqnr_db" in result else "equal"
    cells[_FLOAT] = f"{result['float_db']:.1f} dB, {result['test_mode_db']:.1f} dB"
    if "multiplications" in result:
        cells[_INTEGERS] = f"{result['integer']} of {result['multiplications']}"
    if "speed" in result:
        speed = result["speed"]
        cells[_SPEED] = f"{speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"
    return cells


def _names_by_reason(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the networks that did not run, by the reason or the engine's message."""
    names: dict[str, list[str]] = {}
    for result in rows:
        reason = result.get("cannot_hold", "")
        if "failure" in result:
            reason = f"it ends with `{result['failure'].replace('`', '')}`"
        if reason:
            names.setdefault(reason, []).append(NETWORKS[result["network"]])
    return names


def _listed(names: list[str]) -> str:
    """Return titles of networks, or the few that are missing."""
    missing = [title for title in NETWORKS.values() if title not in names]
    if len(missing) < len(names):
        return f"all but {', '.join(missing)}"
    return ", ".join(names)


def _target(engine: Engine) -> str:
    """Return the target with its options, as on the command line."""
    words = [engine.target]
    for name, value in engine.options.items():
        words.append(f"--{name} {value}")
    return " ".join(words)
