"""Starts the ranks of a run as forks of this process: torchrun would spend seconds on importing torch for each."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantizer.cli import torchrun
from quantizer.cli.main import run_command


@dataclass(frozen=True)
class Rank:
    """How a rank has ended: its exit code, negative for a signal, and what it printed."""

    code: int
    out: str
    err: str


def run_ranks(
    count: int,
    arguments: Sequence[str],
    folder: Path,
    *,
    before: Callable[[int], None] = lambda rank: None,
    after: Callable[[list[int]], None] = lambda pids: None,
) -> list[Rank]:
    """Run one command line on `count` ranks that meet in `folder`.

    `before` is called in each rank with its number, `after` here with all process ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting{time.monotonic_ns()}"
    pids = [_fork(rank, count, arguments, meeting, before) for rank in range(count)]
    after(pids)
    codes = [_ended(pid) for pid in pids]
    texts = [[meeting.with_name(f"{meeting.name}.{rank}.{kind}") for kind in ("out", "err")] for rank in range(count)]
    return [Rank(code, *(path.read_text("utf-8") for path in paths)) for code, paths in zip(codes, texts, strict=True)]


def _fork(rank: int, count: int, arguments: Sequence[str], meeting: Path, before: Callable[[int], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for kind in ("out", "err"):
            setattr(sys, f"std{kind}", meeting.with_name(f"{meeting.name}.{rank}.{kind}").open("w", encoding="utf-8"))
        names = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": 1, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in names.items()})
        torchrun.URL = f"file://{meeting}?rank={rank}&world_size={count}"
        torch.set_num_threads(1)
        before(rank)
        code = run_command(list(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int:
    """Its exit code; a rank that does not end within a minute is killed."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
