"""Write the table in docs/engine_results.md from the results of `make engines`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The program that writes the results is not part of the package.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from engines.table import ENGINES, NETWORKS, Engine

RESULTS = Path(__file__).parents[1] / "benchmarks" / "engines" / "results"
_COLUMNS = (
    "target",
    "engine",
    "network",
    "loads",
    "SQNR against test mode",
    "from float: engine, test mode",
    "in integers",
    "speed of float",
)
_BUSY = "The machine was busy when speeds were measured, so they are only a hint.\n"


def table_of_engines() -> str:
    """Return a row for each engine and network, and what did not run."""
    head = [f"| {' | '.join(_COLUMNS)} |\n", "|---" * len(_COLUMNS) + "|\n"]
    rows: list[str] = []
    notes: list[str] = []
    is_quiet = True
    for engine in ENGINES:
        content = json.loads((RESULTS / f"{engine.name}.json").read_text("utf-8"))
        is_quiet = is_quiet and content["machine"]["is_quiet"]
        for result in content["rows"]:
            if "cannot_hold" not in result:
                rows.append(_row(engine, result))
        for reason, names in _names_by_reason(content["rows"]).items():
            notes.append(f"* {engine.title}, `{_target(engine)}`: {_listed(names)}. {reason}\n")
    sentences = "" if is_quiet else f"\n{_BUSY}"
    return "".join([*head, *rows, sentences, "\n", *notes])


def _row(engine: Engine, result: dict[str, Any]) -> str:
    """Return the row of a network that an engine was given."""
    loads = "yes"
    if "weights" in result:
        kept = f"{result['kept']} of {result['weights']} weights"
        loads = f"converts, with codes and scales of {kept}"
    elif "failure" in result:
        loads = "no"
    name = f"{engine.title} {result.get('version', '')}".strip()
    cells = [f"`{_target(engine)}`", name, NETWORKS[result["network"]], loads]
    cells += _figures(result) if loads == "yes" else [""] * 4
    return f"| {' | '.join(cells)} |\n"


def _figures(result: dict[str, Any]) -> list[str]:
    """Return the cells of a network that ran."""
    closeness = "equal"
    if "sqnr_db" in result:
        closeness = f"{result['sqnr_db']:.1f} dB"
    from_float = f"{result['float_db']:.1f} dB, {result['test_mode_db']:.1f} dB"
    share = ""
    if "multiplications" in result:
        share = f"{result['integer']} of {result['multiplications']}"
    speed = ""
    if "speed" in result:
        figures = result["speed"]
        speed = f"{figures['ratio']:.2f} ({figures['low']:.2f} to {figures['high']:.2f})"
    return [closeness, from_float, share, speed]


def _names_by_reason(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the networks that did not run, by the reason or the engine's message."""
    names: dict[str, list[str]] = {}
    for result in rows:
        reason = result.get("cannot_hold", "")
        if "failure" in result:
            reason = f"Its message: `{result['failure'].replace('`', '')}`"
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
