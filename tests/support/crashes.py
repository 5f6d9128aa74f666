"""Ends a command at each operation on files that it does, as a kill or a power failure would:
nothing is cleaned up.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from quantizer.cli.main import run_command

KILLED = 99
OPERATIONS = tuple(
    (os, name) for name in ("replace", "rename", "unlink", "fsync", "mkdir", "rmdir")
)


def killed_at_each(
    arguments: Sequence[str], prepare: Callable[[], None], step: int = 1
) -> Iterator[int]:
    """Gives n after a run that ended at its operation n, counted from 0, for every `step`-th
    one; each run is a fork of this process, and begins with what `prepare` leaves.
    """
    for stop_at in itertools.count(0, step):
        prepare()
        if not killed_at(arguments, stop_at):
            return
        yield stop_at


def killed_at(arguments: Sequence[str], stop_at: int) -> bool:
    """Run a command in a fork that ends at its operation of that number; whether it came that
    far.
    """
    pid = os.fork()
    if not pid:
        _run(arguments, stop_at)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


def _run(arguments: Sequence[str], stop_at: int) -> None:
    done = itertools.count()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any, **more: Any) -> Any:
            if next(done) == stop_at:
                os._exit(KILLED)
            return original(*given, **more)

        return operation

    code = 1
    signal.alarm(60)  # a fork that hangs ends, and is no code that is expected
    try:
        torch.set_num_threads(1)  # the threads of the other process are not here
        for module, name in OPERATIONS:
            setattr(module, name, counted(getattr(module, name)))
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it ends with the process
        code = run_command(list(arguments))
    finally:
        os._exit(code)
