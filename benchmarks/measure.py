"""Ratios of wall times in one process: the parts take turns, so that a drifting machine slows
all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Part = Callable[[], object]


def seconds(part: Part) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def ratios(base: Part, parts: dict[str, Part], rounds: int) -> dict[str, list[float]]:
    """Each part's time over the base's time of the same round; one uncounted round first."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for count in range(rounds + 1):
        reference = seconds(base)
        for name, part in parts.items():
            ratio = seconds(part) / reference
            if count:
                found[name].append(ratio)
    return found


def peak_mb(part: Part) -> float:
    """Peak resident memory while the part runs, in MB (Linux: the high-water mark is reset
    first).
    """
    Path("/proc/self/clear_refs").write_text("5")
    part()
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        / 1024
    )


def report(
    title: str, found: dict[str, list[float]], targets: dict[str, float], extra: dict[str, str]
) -> None:
    """One line per part: median, spread, target, and whatever else was measured."""
    print(f"\n{title} (median [least .. most]; {torch.get_num_threads()} threads)")
    for name, values in found.items():
        middle = statistics.median(values)
        print(
            f"  {name:<12} {middle:5.3f} [{min(values):5.3f} .. {max(values):5.3f}]"
            f"  target {targets[name]:4.2f}  {extra.get(name, '')}"
        )
