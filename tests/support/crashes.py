"""Ends a command at each operation on files that it does, as a kill or a power failure would:
nothing is cleaned up.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantizer.cli.main import run_command
from quantizer.storage import owned_folder

KILLED = 99
OPERATIONS = (
    *((os, name) for name in ("replace", "rename", "unlink", "fsync", "mkdir", "rmdir")),
    (owned_folder, "exchange"),
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


def copies_at_each(
    arguments: Sequence[str], folder: Path, copies: Path, step: int
) -> list[Path]:
    """Run a command once, to its end, and copy the folder before every `step`-th operation.

    A copy holds what a kill at that operation would leave. Copies that would be equal are made
    once.
    """
    copied: dict[frozenset[tuple[str, str]], Path] = {}
    numbers = itertools.count()
    is_copying = False

    def copy() -> None:
        nonlocal is_copying
        is_copying = True
        state = _state(folder)
        if state not in copied:
            copied[state] = copies / str(len(copied))
            shutil.copytree(folder, copied[state])
        is_copying = False

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*words: Any, **more: Any) -> Any:
            if not is_copying and next(numbers) % step == 0:
                copy()
            return original(*words, **more)

        return operation

    with pytest.MonkeyPatch.context() as patched:
        for module, name in OPERATIONS:
            patched.setattr(module, name, counted(getattr(module, name)))
        assert run_command(list(arguments)) == 0
    return list(copied.values())


def _state(folder: Path) -> frozenset[tuple[str, str]]:
    """Return names and digests of all files; temporary files have one name."""
    files: set[tuple[str, str]] = set()
    for path in folder.rglob("*"):
        name = re.sub(r"\.\w{8}\.tmp$", ".tmp", str(path.relative_to(folder)))
        digest = "folder"
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.name not in ("run.json", "run.log", ".quantizer.json"):
            files.add((name, digest))
    return frozenset(files)
