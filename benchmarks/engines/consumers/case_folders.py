"""Runs the folders that `families/run.py` hands to a consumer.

A consumer is started as `python NAME.py FOLDER ...` in the engine's environment. A folder has
`model` with the suffix of its target, and `expected.npz` with prompts as `call_NAME`. Each gets
`CONSUMER.npz` with outputs, or `CONSUMER.txt` with the message of a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Call = dict[str, Any]
Run = Callable[[Path, Call], Mapping[str, Any]]
NEW_TOKENS = 8
"""How many tokens are generated for each prompt."""


def run_folders(consumer: str, run: Run, version: str, *, is_forked: bool = False) -> None:
    """Run the folders of the command line.

    Args:
        consumer: its name.
        is_forked: whether each folder gets a process of its own, because the engine may crash
            or cannot start twice.
        run: takes a folder and its prompts, and returns "logits" of all tokens or "next_token"
            of the one that follows, and "tokens" if it generates.
        version: of the engine.
    """
    for name in sys.argv[1:]:
        folder = Path(name)
        if not is_forked:
            _run_folder(consumer, run, folder, version)
            continue
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            os._exit(_run_folder(consumer, run, folder, version))
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            text = f"it crashes with signal {os.WTERMSIG(status)}"
            (folder / f"{consumer}.txt").write_text(text, "utf-8")


def _run_folder(consumer: str, run: Run, folder: Path, version: str) -> int:
    call: Call = {}
    with np.load(folder / "expected.npz") as stored:
        for name in stored.files:
            if name.startswith("call_"):
                call[name.removeprefix("call_")] = stored[name]
    try:
        outputs = run(folder, call)
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        (folder / f"{consumer}.txt").write_text(text, "utf-8")
        return 1
    np.savez(folder / f"{consumer}.npz", version=version, **outputs)
    return 0
