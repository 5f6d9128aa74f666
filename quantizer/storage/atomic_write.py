"""Write a file to the disk, and exchange two folders in one call. Knows nothing of whose files
they are. All errors are OSErrors. Imports no torch.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from quantizer.storage.positioned_io import open_flags

_ALL_MAY_READ_AND_WRITE = 0o666
"""The permissions that programs ask for. The system removes those of the umask."""
_OWNER_MAY_READ_AND_WRITE = 0o600
_CURRENT_FOLDER = -100
"""AT_FDCWD of Linux: paths are relative to the current folder."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux."""
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EBUSY, errno.EXDEV)
"""The errors of a system or a file system that cannot exchange folders, and of a folder that is
the root of a file system.
"""


def write_synced(path: Path, parts: Iterable[bytes], permissions: int | None = None) -> str:
    """Write a new file to the disk, and return its sha256. A file that cannot be completed is
    removed.

    Args:
        path: of the file, which does not exist.
        parts: its content.
        permissions: of the file; by default those that the system gives to new files.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    creation_mode = _ALL_MAY_READ_AND_WRITE
    if permissions is not None:
        # Nobody else may read the content before the file has the permissions of the old one
        creation_mode = _OWNER_MAY_READ_AND_WRITE
    digest = hashlib.sha256()
    flags = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW")
    descriptor = os.open(path, flags, creation_mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if permissions is not None:
            os.chmod(path, permissions)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Write to the disk what other programs have written to a file.

    Raises:
        OSError: it cannot be opened or written.
    """
    descriptor = os.open(path, open_flags("O_RDWR"))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
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


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one call, so that both names are there at any moment.

    Returns:
        Whether the system can do this. If not, nothing is changed.

    Raises:
        OSError: it can, and failed.
    """
    rename = _system_rename()
    if rename is None:
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    if rename(_CURRENT_FOLDER, paths[0], _CURRENT_FOLDER, paths[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


def _system_rename() -> "ctypes._NamedFuncPointer | None":
    """Return the function `renameat2` of Linux, or None."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        text = ctypes.c_char_p
        function.argtypes = (ctypes.c_int, text, ctypes.c_int, text, ctypes.c_uint)
    return function
