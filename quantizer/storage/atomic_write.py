"""Replaces a file or a folder whole or not at all: temporary sibling, rename. Errors are
OSErrors; imports no torch.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from quantizer.storage.positioned_io import open_flags

TEMPORARY = ".tmp"
LEFT_OVER = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(TEMPORARY)}")
"""Names of temporary files and folders, which a kill leaves behind."""


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write `content`, also part by part, to `path`; a crash leaves the old file or the new
    one, which gets its rights.

    Raises:
        OSError: the folder cannot be written or the disk is full; then no temporary file stays.
    """
    target = _resolved(path)
    parts = [content] if isinstance(content, bytes) else content
    if target.exists() and not target.is_file():
        _write_to_device(target, parts)
        return
    mode = target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync(target.parent)


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill. It replaces the one at `path` at the end, and is removed
    after an error.

    Raises:
        OSError: the folder around it cannot be written.
    """
    with _beside(path) as (target, new):
        new.mkdir()
        yield new
        if target.exists():
            os.rename(target, new.with_name("old"))
        os.rename(new, target)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a path for a new file, alone in a folder. The file replaces `path` at the end, and
    is removed after an error.

    Raises:
        OSError: the folder around it cannot be written.
    """
    with _beside(path) as (target, new):
        yield new
        os.replace(new, target)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the place that `path` is, and one of its name in a new folder beside it."""
    target = _resolved(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    named = {"prefix": f".{target.name}.", "suffix": TEMPORARY}
    with tempfile.TemporaryDirectory(
        dir=target.parent, ignore_cleanup_errors=True, **named
    ) as room:
        yield target, Path(room, target.name)
    _sync(target.parent)


def remove_left_over(folder: Path) -> None:
    """Remove what killed runs have left in a folder that nobody else writes to now."""
    for path in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if LEFT_OVER.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    """Return what links lead to.

    Raises:
        OSError: they lead in a circle.
    """
    try:
        return path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _write_to_device(path: Path, parts: Iterable[bytes]) -> None:
    """Write to a pipe that a process reads, or to a device such as /dev/null.

    Raises:
        OSError: nobody reads the pipe; opening it would wait for ever.
    """
    descriptor = os.open(path, open_flags("O_WRONLY", "O_NONBLOCK"))
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(parts)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, where a folder can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
