"""Work on files of others that is done in this process of tests, not in a fork of it.

A process of tests is large: each fork takes a tenth of a second. Tests of the limits set them,
and have forks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quantizer.storage import child_process


def work_here(patched: pytest.MonkeyPatch) -> None:
    """Do the work at once where the limits are the usual ones, and pass on what came of it."""
    forked = child_process._forked
    usual = child_process.SECONDS, child_process.MEMORY

    @contextmanager
    def done(work: Callable[[], Any], memory: int) -> Iterator[tuple[int, int]]:
        if usual != (child_process.SECONDS, child_process.MEMORY):
            with forked(work, memory) as process:
                yield process
            return
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(child_process._outcome(work)).encode())
            file.seek(0)
            # There has to be a process that ends
            yield os.posix_spawn("/bin/true", ["true"], {}), file.fileno()

    patched.setattr(child_process, "_forked", done)
