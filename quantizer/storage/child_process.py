"""Run work on files of others in a process of its own, with limits of time and of memory.

What a library does with such a file may not end, may take all memory or may end the process.
"""

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from quantizer.errors import QuantizerError, lacks_memory
from quantizer.storage.process_memory import size_text

SECONDS = 60
"""The time limit of work on a small file."""
SECONDS_PER_MB = 10
"""How much longer work on a larger file may take."""
MEMORY = 10**9
"""The bytes that work on a small file may use."""
MEMORY_PER_BYTE = 200
"""How many more bytes work may use for each byte of a larger file."""
_RESULT_SHARE = 4
"""The result may have this part of the memory."""
_CHUNK = 1 << 20
_HELP = "the file may be damaged or hostile; a file of ordinary size and content needs far less"


def run_apart(
    work: Callable[[], Any], what: str, error: type[QuantizerError], *, size: int
) -> Any:
    """Return what `work()` returns, which must have a form in JSON.

    It runs in a fork of this process. Elsewhere than on Linux it runs here, without limits.

    Args:
        work: may raise a `QuantizerError`, whose message and help are passed on.
        what: names the work in messages, such as "encode() of FILE".
        error: the class of errors to raise.
        size: the bytes of the files that it reads. The limits grow with it.

    Raises:
        error: `work` raised it, or it takes too long or too much memory, or it ended the
            process.
    """
    if sys.platform != "linux":
        return work()
    seconds = SECONDS + SECONDS_PER_MB * size / 1e6
    memory = MEMORY + MEMORY_PER_BYTE * size
    with _forked(work, memory) as (pid, source):
        content = _read(source, time.monotonic() + seconds, memory // _RESULT_SHARE)
        is_whole = content is not None and len(content) <= memory // _RESULT_SHARE
        if not is_whole:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if content is None:
        raise error(f"{what} takes more than {seconds:.0f} s", help=_HELP)
    too_much = error(f"{what} needs more than {size_text(memory)} of memory", help=_HELP)
    if is_whole and os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise error(f"{what} ended its process with {name}", help=_HELP)
    if not content or not is_whole:
        raise too_much
    kind, *values = json.loads(content)
    if kind == "memory":
        raise too_much
    if kind == "error":
        raise error(values[0], help=values[1])
    if kind == "raised":
        raise error(f"{what} raised {values[0]}", help=_HELP)
    return values[0]


def loaded_twice(
    load: Callable[[], Any], what: str, error: type[QuantizerError], *, size: int
) -> Any:
    """Return what `load()` returns, after it was loaded within limits in a process of its own.
    The arguments are those of `run_apart`.
    """
    run_apart(lambda: load() is None, what, error, size=size)
    return load()


@contextlib.contextmanager
def _forked(work: Callable[[], Any], memory: int) -> Iterator[tuple[int, int]]:
    """Yield the id of a process that does the work, and the pipe with its answer."""
    source, target = os.pipe()
    with warnings.catch_warnings():
        # Python warns about forks of processes with threads. The fork needs none of their locks
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        _answer(work, memory, target)
    os.close(target)
    try:
        yield pid, source
    except BaseException:
        # Ctrl-C, for example
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        os.close(source)


def _answer(work: Callable[[], Any], memory: int, target: int) -> NoReturn:
    """Run the work in the new process, and write the result to the pipe `target`."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        gc.disable()
        faulthandler.disable()
        # Libraries print why they abort
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        _limit(memory)
        with open(target, "wb", closefd=False) as file:
            file.write(json.dumps(_outcome(work)).encode())
    finally:
        os._exit(0)


def _outcome(work: Callable[[], Any]) -> list[Any]:
    """Return how the work ended: a word, and the result or the text of the error."""
    try:
        return ["done", work()]
    except BaseException as cause:  # noqa: BLE001 - panics of Rust are no Exceptions
        if lacks_memory(cause):
            return ["memory"]
        if isinstance(cause, QuantizerError):
            return ["error", cause.message, cause.help]
        return ["raised", f"{type(cause).__name__}: {cause}"]


def _limit(memory: int) -> None:
    """Set the limit of this process: the memory that it has now, and `memory` bytes more."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(source: int, until: float, most: int) -> bytes | None:
    """Return what comes from a pipe, with at most one byte more than `most`; None if it takes
    too long.
    """
    parts: list[bytes] = []
    size = 0
    while size <= most:
        ready, _, _ = select.select([source], [], [], max(0, until - time.monotonic()))
        if not ready:
            return None
        part = os.read(source, _CHUNK)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)
