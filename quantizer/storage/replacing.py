"""Replace a file completely or not at all, if it is quantizer's or the user allows it. Each
function finds out itself whose file it is. Imports no torch.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import UsageError
from quantizer.storage.atomic_write import sync_folder, write_synced
from quantizer.storage.owned_folder import OwnedFolder
from quantizer.storage.ownership import is_owned, owned, owner_of, unlocked
from quantizer.storage.permission import require_replaceable
from quantizer.storage.positioned_io import open_flags

_MOST_DEPTH = 2
"""How far above a file the list of its folder may be: `export/verify.json`."""


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> str:
    """Write a file, and return its sha256. At any moment, `path` is the complete old file or
    the complete new one.

    The new file gets the permissions of the old one. A device or a pipe is written to, and not
    replaced.

    Args:
        path: the file. A link is followed, but not in a folder of quantizer's.
        content: the bytes, or their parts in order.

    Raises:
        UsageError: the file exists, is not listed as quantizer's and unchanged, and there is no
            `--overwrite`; or it is an input of the run.
        OSError: the folder cannot be written or the disk is full. No temporary file stays.
    """
    parts = [content] if isinstance(content, bytes) else content
    target = resolve_folder(path)
    with owner_to_write(target) as owner:
        if owner is None:
            return _replace_single_file(target, parts)
        if owner.work in target.parents:
            # Nobody reads it before it is moved, with the others of its set
            return owner.write_new(target, parts)
        return owner.write(owner.name_of(target), parts)


def require_writable(path: Path) -> None:
    """Check before work begins that `replace_file` will not refuse a file.

    Raises:
        UsageError: see `replace_file`.
        OSError: what is at `path` cannot be read.
    """
    target = resolve_folder(path)
    if target.is_dir():
        raise UsageError(f"{path} is a directory", help="give the path of a file")
    for parent in list(target.parents)[:_MOST_DEPTH]:
        if is_owned(parent):
            owner = owner_of(target) or unlocked(parent)
            owner.require_ours(owner.name_of(target))
            return
    if target.is_file():
        require_replaceable(path)


def remove_file(path: Path) -> None:
    """Remove a file, if it is in a folder of quantizer's, is listed there and was not changed.

    Raises:
        OSError: it cannot be removed.
    """
    target = resolve_folder(path)
    with owner_to_write(target) as owner:
        if owner is not None:
            owner.remove(owner.name_of(target))


@contextmanager
def owner_to_write(path: Path) -> Iterator[OwnedFolder | None]:
    """Yield the folder of quantizer's that a path is in, whose lock is held inside the `with`
    block; None if it is in none.
    """
    owner = owner_of(path)
    if owner is not None:
        yield owner
        return
    for parent in list(path.parents)[:_MOST_DEPTH]:
        if is_owned(parent):
            with owned(parent, no_earlier_files) as owner:
                yield owner
            return
    yield None


def _replace_single_file(path: Path, parts: Iterable[bytes]) -> str:
    """Replace a file outside the folders of quantizer, and return its sha256."""
    try:
        target = path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    if target.exists() and not target.is_file() and not target.is_dir():
        return _write_to_device(target, parts)
    require_replaceable(target)
    permissions = None
    if target.exists():
        permissions = stat.S_IMODE(target.stat().st_mode)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(16)}.tmp")
    digest = write_synced(temporary, parts, permissions)
    try:
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(target.parent)
    return digest


def resolve_folder(path: Path) -> Path:
    """Return a path whose folder is absolute and after links. The last part may be a link,
    which is not followed in the folders of quantizer.

    Raises:
        OSError: the links form a circle.
    """
    try:
        return path.parent.resolve() / path.name
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _write_to_device(path: Path, parts: Iterable[bytes]) -> str:
    """Write to a pipe that another process reads, or to a device such as /dev/null, and return
    the sha256 of what was written.

    Raises:
        OSError: no process reads the pipe. Without O_NONBLOCK, opening it would wait forever.
    """
    descriptor = os.open(path, open_flags("O_WRONLY", "O_NONBLOCK"))
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    digest = hashlib.sha256()
    with os.fdopen(descriptor, "wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def no_earlier_files(folder: Path) -> dict[str, str]:
    """Return that no version without lists has written a folder."""
    return {}
