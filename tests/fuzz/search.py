"""What the programs of this folder have in common: seeds, one after the other, for so many
seconds.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import torch


def search(one: Callable[[int], tuple[str, list[str]]]) -> NoReturn:
    """Go through seeds for as long as the command line says, `SECONDS [FIRST_SEED]`; exit with
    1 if anything is found.

    Args:
        one: how a seed ended, in a word, and what was found. What it raises is a finding.
    """
    torch.set_num_threads(1)
    seconds, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    until, ends, findings, seed = time.monotonic() + seconds, Counter[str](), 0, first
    while time.monotonic() < until:
        try:
            end, found = one(seed)
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            end, found = "raised", [f"{type(error).__name__}: {error}"]
        ends[end] += 1
        findings += len(found)
        for each in found:
            print(f"seed {seed}: {each}", flush=True)
        seed += 1
    print(f"seeds {first} to {seed - 1}: {dict(sorted(ends.items()))}, {findings} findings")
    sys.exit(bool(findings))
