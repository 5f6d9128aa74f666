"""Starts the ranks of a run as forks of this process: torchrun would spend seconds on importing
torch for each.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantizer.cli.main import run_command
from quantizer.cli.modes import torchrun


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
) -> list[Rank]:
    """Run one command line on `count` ranks that meet in `folder`.

    `before` is called in each rank with its number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting{time.monotonic_ns()}"
    pids = [_fork(rank, count, arguments, meeting, before) for rank in range(count)]
    codes = [_ended(pid) for pid in pids]
    for pid, code in zip(pids, codes, strict=True):
        if code == -signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    texts = [
        [meeting.with_name(f"{meeting.name}.{rank}.{kind}") for kind in ("out", "err")]
        for rank in range(count)
    ]
    return [
        Rank(code, *(path.read_text("utf-8") for path in paths))
        for code, paths in zip(codes, texts, strict=True)
    ]


def _fork(
    rank: int,
    count: int,
    arguments: Sequence[str],
    meeting: Path,
    before: Callable[[int], None],
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for kind in ("out", "err"):
            setattr(
                sys,
                f"std{kind}",
                meeting.with_name(f"{meeting.name}.{rank}.{kind}").open("w", encoding="utf-8"),
            )
        names = {
            "RANK": rank,
            "WORLD_SIZE": count,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 1,
            "LOCAL_RANK": rank,
        }
        os.environ.update({name: str(value) for name, value in names.items()})
        torchrun._URL = f"file://{meeting}?rank={rank}&world_size={count}"
        torch.set_num_threads(1)
        before(rank)
        code = run_command(list(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int:
    """Its exit code, negative for the signal that ended or stopped it; after a minute it is
    killed.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if done:
            return (
                -os.WSTOPSIG(status)
                if os.WIFSTOPPED(status)
                else os.waitstatus_to_exitcode(status)
            )
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
