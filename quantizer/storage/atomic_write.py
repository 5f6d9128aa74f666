"""Replace a file or a folder completely or not at all: the new one is written under a temporary
name in the same folder, then renamed. All errors are OSErrors. Imports no torch.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from quantizer.storage.positioned_io import open_flags

TEMPORARY_SUFFIX = ".tmp"
TEMPORARY_NAME = re.compile(rf"\..+\.[a-z0-9_]{{8}}{re.escape(TEMPORARY_SUFFIX)}")
"""Matches the names of temporary files and folders, which stay if the process is killed."""
_ALL_MAY_READ_AND_WRITE = 0o666
"""The permissions that programs ask for. The system removes those of the umask."""
_OWNER_MAY_READ_AND_WRITE = 0o600


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file. At any moment, `path` is the complete old file or the complete new one.

    The new file gets the permissions of the old one. A device or a pipe is written to, and not
    replaced.

    Args:
        path: the file. Links are followed.
        content: the bytes, or their parts in order.

    Raises:
        OSError: the folder cannot be written or the disk is full. No temporary file stays.
    """
    target = _resolve_links(path)
    parts = [content] if isinstance(content, bytes) else content
    if not target.exists():
        _write_and_rename(target, parts, None)
    elif target.is_file():
        permissions = stat.S_IMODE(target.stat().st_mode)
        _write_and_rename(target, parts, permissions)
    else:
        _write_to_device(target, parts)


def _write_and_rename(target: Path, parts: Iterable[bytes], permissions: int | None) -> None:
    """Write a temporary file and rename it to `target`.

    Args:
        target: the file to write, or to replace.
        parts: its content.
        permissions: of the file; by default those that the system gives to new files.
    """
    creation_mode = _ALL_MAY_READ_AND_WRITE
    if permissions is not None:
        # Nobody else may read the content before the file has the permissions of the old one
        creation_mode = _OWNER_MAY_READ_AND_WRITE
    # 8 characters, as `TEMPORARY_NAME` has them
    token = os.urandom(4).hex()
    temporary = target.with_name(f".{target.name}.{token}{TEMPORARY_SUFFIX}")
    flags = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW")
    descriptor = os.open(temporary, flags, creation_mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if permissions is not None:
            os.chmod(temporary, permissions)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill. When the `with` block ends, it replaces the folder at `path`.
    After an error it is removed.

    Raises:
        OSError: the folder that contains `path` cannot be written.
    """
    with _temporary_sibling(path) as (target, new):
        new.mkdir()
        yield new
        if target.exists():
            os.rename(target, new.with_name("old"))
        os.rename(new, target)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file to write, alone in a folder. When the `with` block ends, the
    file replaces the one at `path`. After an error it is removed.

    Raises:
        OSError: the folder that contains `path` cannot be written.
    """
    with _temporary_sibling(path) as (target, new):
        yield new
        os.replace(new, target)


@contextlib.contextmanager
def _temporary_sibling(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield what `path` is after links, and a path of the same name in a temporary folder.

    That folder is a sibling of the first path, so that a rename moves no data. It is removed at
    the end, with all that is still in it.
    """
    target = _resolve_links(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent,
        prefix=f".{target.name}.",
        suffix=TEMPORARY_SUFFIX,
        ignore_cleanup_errors=True,
    ) as folder:
        yield target, Path(folder, target.name)
    _sync_folder(target.parent)


def remove_left_over(folder: Path) -> None:
    """Remove temporary files and folders that killed runs have left.

    No other process may be writing to the folder.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if not TEMPORARY_NAME.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _resolve_links(path: Path) -> Path:
    """Return the absolute path after links.

    Raises:
        OSError: the links form a circle.
    """
    try:
        return path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _write_to_device(path: Path, parts: Iterable[bytes]) -> None:
    """Write to a pipe that another process reads, or to a device such as /dev/null.

    Raises:
        OSError: no process reads the pipe. Without O_NONBLOCK, opening it would wait forever.
    """
    descriptor = os.open(path, open_flags("O_WRONLY", "O_NONBLOCK"))
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(parts)


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, so that a rename in it survives a power
    failure. Windows cannot open folders, and has no such call.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
