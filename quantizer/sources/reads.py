"""What a piece of work depends on: the code it ran, the files and folders it read.

Python tells an audit hook of each file that is opened (PEP 578). What libraries written in C
open on their own it does not tell; such files have to be named.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HASHED_BYTES = 32 << 20
"""Larger files are told by their size and times, as reading them would take longer than what is
saved.
"""
_INSTALLED = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_VOLATILE = ("/proc/", "/sys/", "/dev/")


@dataclass
class Reads:
    """The files that were read and the folders that were listed, by absolute paths."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)

    def stamps(self) -> dict[str, str]:
        """What tells each of them, and each file of a module that is imported, from a changed
        one.
        """
        modules = {
            path
            for module in list(sys.modules.values())
            if (path := getattr(module, "__file__", None))
        }
        files = {source_of(path) for path in self.files} | {
            os.path.abspath(path) for path in modules
        }
        return {path: stamp(path) for path in sorted(files | self.folders)}


def source_of(path: str) -> str:
    """The Python file that a compiled one in `__pycache__` was made of; any other path as it
    is.
    """
    if not path.endswith(".pyc"):
        return path
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:  # some tools have names of their own there
        return path


def stamp(path: str) -> str:
    """A digest of a file or of the names in a folder; of large files and of installed code the
    size and times.
    """
    try:
        if os.path.isdir(path):
            return digest("\n".join(sorted(os.listdir(path))).encode(errors="surrogateescape"))
        facts = os.stat(path)
        if facts.st_size > HASHED_BYTES or path.startswith(_INSTALLED):
            return f"{facts.st_size} {facts.st_mtime_ns}"
        return digest(Path(path).read_bytes())
    except OSError as error:
        return f"error {error.errno}"


def are_unchanged(stamps: Mapping[str, str]) -> bool:
    """Whether all that was read is as it was."""
    return all(stamp(path) == before for path, before in stamps.items())


@contextmanager
def recorded(also: Iterable[Path] = ()) -> Iterator[Reads]:
    """What this process reads meanwhile, in any thread; `also` are files that C libraries
    open.
    """
    if not _hooked:
        sys.addaudithook(_note)  # for good: Python cannot remove one
        _hooked.append(True)
    reads = Reads({os.path.abspath(path) for path in also})
    _recording.append(reads)
    try:
        yield reads
    finally:
        _recording.remove(reads)


_hooked: list[bool] = []
_recording: list[Reads] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    if not _recording or event not in ("open", "os.listdir", "os.scandir"):
        return
    path = "." if args[0] is None else args[0]
    if not isinstance(path, (str, bytes, os.PathLike)) or (
        event == "open" and _writes(*args[1:])
    ):
        return
    place = os.path.abspath(os.fsdecode(path))
    if place.startswith(_VOLATILE):
        return
    if event != "open":
        # the import system lists folders to find modules, which are then opened
        if not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
            for reads in _recording:
                reads.folders.add(place)
        return
    for reads in _recording:
        reads.files.add(place)


def _writes(mode: str | None = None, flags: int = 0, *_: Any) -> bool:
    """Whether a file is opened to be written anew."""
    return mode[:1] in ("w", "a", "x") if mode else flags & os.O_ACCMODE != os.O_RDONLY


def digest(content: bytes) -> str:
    """In hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
