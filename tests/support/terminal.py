"""A terminal that a process writes to, and what is on its screen in the end."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

_TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(.)", re.DOTALL)


def run_on_terminal(arguments: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command of quantizer on a terminal of 80 columns; returns its exit code and the
    lines on the screen.
    """
    screen, process_side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("CI", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "quantizer", *arguments],
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
        cwd=folder,
        env=environment,
        # A job in the background ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(process_side)
    text = b""
    while chunk := _read(screen):
        text += chunk
    os.close(screen)
    return process.wait(), screen_of(text.decode())


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        # So the kernel says that the process has ended
        return b""


def screen_of(text: str) -> list[str]:
    """The lines that a terminal shows after a text with moves of its cursor."""
    lines = [""]
    row = column = 0
    for amount, command, character in _TOKENS.findall(text):
        if command == "A":
            row = max(0, row - int(amount or 1))
        elif command == "K":
            lines[row] = "" if amount == "2" else lines[row][:column]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif character:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + character + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
