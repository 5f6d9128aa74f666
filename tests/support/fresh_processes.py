"""Fresh processes that need not import torch: forks of one that has imported it, the command
line and what traces a model. A test that needs a process of its own saves three seconds.

A process begins with `PACKAGES`, with torch as well, or with this package's code, too.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
QUANTIZER = "import runpy; runpy.run_module('quantizer', run_name='__main__', alter_sys=True)"
"""What `python -m quantizer` runs."""
PACKAGES = "packages"
"""Has imported what `--help` takes from other packages, and nothing of this one."""
TORCH = "torch"
"""Has imported torch, too, exported a module, and imported what pages are made with."""
COMMANDS = "commands"
"""Has imported torch and the command line, and not what traces a model."""
TRACER = "tracer"
"""Has traced a model."""
_LIMITS = {"file_size": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}
_SERVER = """
from support import fresh_processes
_CODE = fresh_processes.next_code(*__import__("sys").argv[1:])
exec(compile(_CODE, "<fresh process>", "exec"), {"__name__": "__main__"})
"""


class FreshProcess:
    """Code that runs in a process of its own, and what it prints."""

    def __init__(
        self, code: str, *arguments: str, cwd: Path, begins_with: str = TRACER, **limits: int
    ) -> None:
        self._server = _server(begins_with)
        self._streams = tempfile.TemporaryDirectory()
        request = {
            "code": code,
            "arguments": arguments,
            "cwd": str(cwd),
            "environment": dict(os.environ),
            "limits": limits,
            "streams": self._streams.name,
        }
        self.pid = self._server.start(request)
        self.code: int | None = None

    def send_signal(self, sent: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, sent)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the process ends within so many seconds."""
        if self.code is None:
            self.code = self._server.exit_code(timeout_s)
        return self.code is not None

    def finished(self, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Return the exit code, negative for a signal, and what was printed."""
        if not self.has_ended(timeout_s):
            self.send_signal(signal.SIGKILL)
            self.has_ended(30)
            raise AssertionError(f"the process took more than {timeout_s} s")
        assert self.code is not None
        out, err = (Path(self._streams.name, name).read_text("utf-8") for name in ("1", "2"))
        self._streams.cleanup()
        return subprocess.CompletedProcess([], self.code, out, err)


def run(
    code: str, *arguments: str, cwd: Path, begins_with: str = TRACER, **limits: int
) -> subprocess.CompletedProcess[str]:
    """Run code with `sys.argv[1:]` in a fresh process and wait for its end."""
    process = FreshProcess(code, *arguments, cwd=cwd, begins_with=begins_with, **limits)
    return process.finished()


@dataclass(frozen=True)
class _Server:
    """The process that forks."""

    process: subprocess.Popen[str]
    answers: int

    def start(self, request: dict[str, Any]) -> int:
        """Return the process id of a fork that runs a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        pid = self.exit_code(60)
        assert pid is not None, "no process was started"
        return pid

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the next number that it answers, None if there is none in time."""
        readable, _, _ = select.select([self.answers], [], [], timeout_s)
        if not readable:
            return None
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.answers, 1)
        return int(line)


@cache
def _server(begins_with: str) -> _Server:
    answers, writes = os.pipe()
    paths = [str(TESTS), str(TESTS.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(writes), begins_with],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        pass_fds=[writes],
        text=True,
    )
    os.close(writes)

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    atexit.register(end)
    return _Server(process, answers)


def next_code(answers_to: str, begins_with: str) -> str:
    """Fork for each request; return its code in the fork, which then ends as any process does.

    Only the server calls this.
    """
    answers = int(answers_to)
    _import_what(begins_with)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            os.close(answers)
            return _prepared(request)
        os.write(answers, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _import_what(begins_with: str) -> None:
    """Import what the processes begin with."""
    if begins_with == PACKAGES:
        import click  # noqa: F401
        import filelock  # noqa: F401
        import jsonschema  # noqa: F401

        return
    import torch

    if begins_with == TORCH:
        # Forks may use no threads of this process
        torch.set_num_threads(1)
        open_batch = ({0: torch.export.Dim.AUTO},)
        torch.export.export(
            torch.nn.Linear(1, 1), (torch.ones(2, 1),), dynamic_shapes=open_batch
        )
        import jinja2  # noqa: F401

        return
    import quantizer.cli.main

    if begins_with == TRACER:
        # Importing it takes a second
        import quantizer.cli.modes.calib_mode  # noqa: F401
        from quantizer.graph.tracing.trace import trace

        trace(torch.nn.Linear(2, 2).eval(), (torch.zeros(2, 2),))


def _prepared(request: dict[str, Any]) -> str:
    """Make this fork what a process is that begins with the request."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for stream in (1, 2):
        path = Path(request["streams"], str(stream))
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    # A job in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "file_size" in request["limits"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for name, most in request["limits"].items():
        resource.setrlimit(_LIMITS[name], (most, most))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path.insert(0, request["cwd"])
    sys.argv[1:] = request["arguments"]
    code: str = request["code"]
    return code
