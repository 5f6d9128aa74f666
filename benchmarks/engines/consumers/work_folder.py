"""The folder that `run.py` hands to a consumer: reads inputs, writes outputs, facts and times.

A consumer is started as `python NAME.py FOLDER` in the engine's environment, so this imports
only numpy. The folder has `model` with the suffix of the target, `inputs.npz`, and `float` with
its suffix if the engine is timed. All engines run in one thread. A consumer file must not have
the name of a package.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = Callable[[], object]
MIN_SECONDS = 0.02
"""A measurement repeats a run until it takes so long."""


def folder() -> Path:
    """Return the folder that the command line names."""
    return Path(sys.argv[1])


def inputs() -> list[NDArray[Any]]:
    """Return the inputs of one call, in the order of the model's arguments."""
    return _arrays(folder() / "inputs.npz", "input")


def finish(outputs: Sequence[Any], facts: dict[str, Any]) -> None:
    """Write the outputs, in the order of the model's, and what is known about the engine.

    Args:
        facts: "version", and as far as they are known "integer" and "multiplications" (the
            number of multiplications in integers, and of all), "seconds", "float_seconds".
    """
    arrays: dict[str, Any] = {}
    for index, output in enumerate(outputs):
        arrays[f"output_{index}"] = np.asarray(output)
    np.savez(folder() / "outputs.npz", **arrays)
    store_facts(facts)


def store_facts(facts: dict[str, Any]) -> None:
    """Write what is known about the engine.

    Without outputs, that is "version", "weights" (how many weights the file has as codes), and
    "kept" (how many of them have the same codes and scales after conversion).
    """
    (folder() / "facts.json").write_text(json.dumps(facts), "utf-8")


def times(run: Run, float_run: Run | None = None) -> dict[str, list[float]]:
    """Return the processor's seconds of a run, for each round that `settings.json` asks for.

    The float network runs in the same rounds, and they take turns to be first. So what slows
    the machine down slows both.
    """
    rounds = json.loads((folder() / "settings.json").read_text("utf-8"))["rounds"]
    runs = {"seconds": run}
    if float_run is not None:
        runs["float_seconds"] = float_run
    repeats = {name: _repeats(runs[name]) for name in runs}
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        order = list(runs) if index % 2 == 0 else list(reversed(runs))
        for name in order:
            measured[name].append(_seconds(runs[name], repeats[name]))
    return measured


def _arrays(path: Path, prefix: str) -> list[NDArray[Any]]:
    with np.load(path) as stored:
        return [stored[f"{prefix}_{index}"] for index in range(len(stored.files))]


def _repeats(run: Run) -> int:
    # The first run prepares memory.
    run()
    seconds = max(_seconds(run, 1), 1e-6)
    return max(1, math.ceil(MIN_SECONDS / seconds))


def _seconds(run: Run, repeats: int) -> float:
    # Other programs do not add to the time of the processor, and each engine has one thread.
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats
