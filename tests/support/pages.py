"""A page of docs/ with files, commands and what the commands print, run as it is written.

A block ```python whose first line is `# NAME` is a file. A block without a language is commands
if it begins with the name of a program. Otherwise it is what the commands above it print. A
block ```json after "As `NAME`:" is a file from the beginning.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantizer.cli.main import run_command
from support.runs import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"(?:[\w/]+/)?(?:quantizer|pip|python|sed) ")
"""The begin of a command. A program may be that of a virtual environment."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


_CONFIG = re.compile(r"As `(\w+\.json)`:\n\n```json\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each block: "file", "commands", "printed" or a language."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    for language, block in _FENCE.findall(text):
        if language == "python" and re.match(r"# [\w/]+\.py\n", block):
            yield "file", block
        elif language:
            yield language, block
        elif _COMMAND.match(block):
            yield "commands", block
        else:
            yield "printed", block


def commands_of(block: str) -> list[str]:
    """Return the commands of a block. A backslash at the end of a line continues it, and so
    does an open quote.
    """
    commands = []
    command = ""
    for line in block.replace("\\\n", " ").splitlines():
        command += line
        try:
            shlex.split(command)
        except ValueError:
            command += "\n"
            continue
        commands.append(command)
        command = ""
    return commands


def run_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a page in the current folder, and compare what its commands print."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    for name, content in _CONFIG.findall(text):
        Path(name).write_text(content, "utf-8")
    printed = ""
    for kind, block in blocks(page):
        if kind == "file":
            Path(block.splitlines()[0].removeprefix("# ")).write_text(block, "utf-8")
        elif kind == "commands":
            for command in commands_of(block):
                _run(command)
            printed = "".join(capsys.readouterr())
        elif kind == "printed":
            for line in block.splitlines():
                assert is_shown(line, printed), f"{page}: {line}\n{printed}"


def is_shown(line: str, printed: str) -> bool:
    """Return whether a line of a page was printed.

    An ellipsis is any text, a number is any number, and spaces have any width.
    """
    parts = []
    for part in line.split("…"):
        words = [re.escape(word) for word in _NUMBER.sub("0", part).split()]
        parts.append(r"\s+".join(words))
    pattern = r".*".join(parts)
    return re.search(pattern, _NUMBER.sub("0", printed)) is not None


def _run(command: str) -> None:
    program, *words = shlex.split(command)
    program = program.rpartition("/")[2]
    if program == "pip":
        assert words[0] == "install"
    elif program == "quantizer":
        assert run_command(words) == 0, command
    elif words[:2] == ["-m", "venv"]:
        # The environment of the test has the packages
        return
    elif program == "python":
        (script,) = words
        runpy.run_path(script)
    else:
        subprocess.run(["bash", "-c", command], check=True)
