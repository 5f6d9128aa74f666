"""Starts a consumer, and compares its outputs with those of test mode and of the float
network.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.results import Row
from engines.table import Engine
from quantizer.export.exporting import size_on_disk
from quantizer.export.performance import Speed
from quantizer.export.targets import EXPORTERS

CONSUMERS = Path(__file__).with_name("consumers")
TIMEOUT_SECONDS = 900
LONGEST_MESSAGE = 200
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")


def figures_of(network: str, config: str, engine: Engine, folder: Path, python: Path) -> Row:
    """Run an engine's consumer in a folder, and return the row of the network."""
    failure = failure_of(python, CONSUMERS / engine.consumer, folder)
    if failure:
        return Row(network, config, failure=failure)
    kernels = json.loads((folder / "kernels.json").read_text("utf-8"))
    facts = kernels | json.loads((folder / "facts.json").read_text("utf-8"))
    version = facts["version"]
    if "weights" in facts:
        kept, weights = facts["kept"], facts["weights"]
        return Row(network, config, version=version, kept=kept, weights=weights)
    outputs, expected, floats = (
        arrays(folder / name) for name in ("outputs.npz", "test_mode.npz", "float.npz")
    )
    different = difference_in_kind(outputs, expected)
    if different:
        return Row(network, config, failure=different, version=version)
    return Row(
        network,
        config,
        version=version,
        sqnr_db=worst_db(expected, outputs),
        float_db=worst_db(floats, outputs),
        test_mode_db=worst_db(floats, expected),
        integer=facts.get("integer"),
        multiplications=facts.get("multiplications"),
        speed=speed_of(facts),
        seconds=median_of(facts),
        size=size_on_disk(engine.target, folder / f"model{EXPORTERS[engine.target].suffix}"),
    )


def failure_of(python: Path, consumer: Path, folder: Path) -> str:
    """Run a consumer, and return how it failed; nothing if it ended well."""
    command = [str(python), str(consumer), str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"it does not end within {TIMEOUT_SECONDS} s"
    if done.returncode < 0:
        return f"it crashes with signal {-done.returncode}"
    if done.returncode == 0:
        return ""
    (folder / "errors.txt").write_text(done.stderr, "utf-8")
    return message_of(done.stderr).replace(str(folder), "FOLDER")[:LONGEST_MESSAGE]


def message_of(errors: str) -> str:
    """Return the line of the last exception in what a program printed, or else the last line.

    Engines in other languages add their own stack to the message.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        if EXCEPTION.match(line):
            return line
    return lines[-1] if lines else "it fails without a message"


def difference_in_kind(outputs: list[Any], expected: list[Any]) -> str:
    """Return how outputs cannot be compared with test mode's; nothing if they can."""
    if len(outputs) != len(expected):
        return f"it has {len(outputs)} outputs, and test mode {len(expected)}"
    for index, (ours, theirs) in enumerate(zip(expected, outputs, strict=True)):
        if ours.shape != theirs.shape:
            return (
                f"output {index} has the shape {list(theirs.shape)}, and {list(ours.shape)} "
                "in test mode"
            )
        if not np.isfinite(theirs).all():
            return f"output {index} has values that are not finite"
    return ""


def worst_db(reference: list[NDArray[Any]], others: list[NDArray[Any]]) -> float | None:
    """Return the lowest SQNR of all outputs in dB; None if all are equal."""
    worst: float | None = None
    for want, got in zip(reference, others, strict=True):
        wanted = want.astype(np.float64)
        noise = float(np.square(wanted - got).sum())
        if noise == 0:
            continue
        signal = float(np.square(wanted).sum())
        figure = -math.inf if signal == 0 else 10 * math.log10(signal / noise)
        worst = figure if worst is None else min(worst, figure)
    return None if worst is None else round(worst, 2)


def arrays(path: Path) -> list[NDArray[Any]]:
    """Return the outputs of a file, in order."""
    with np.load(path) as stored:
        return [stored[f"output_{index}"] for index in range(len(stored.files))]


def speed_of(facts: dict[str, Any]) -> dict[str, float] | None:
    """Return float's time divided by the file's, with its quartiles."""
    if "float_seconds" not in facts:
        return None
    speed = Speed.of(facts["seconds"], facts["float_seconds"])
    if speed is None:
        return None
    ratios = {"ratio": speed.ratio, "low": speed.low, "high": speed.high}
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    return {**rounded, "rounds": speed.rounds}


def median_of(facts: dict[str, Any]) -> float | None:
    """Return the median time of one run in seconds."""
    seconds = facts.get("seconds")
    return float(f"{np.median(seconds):.3g}") if seconds else None
