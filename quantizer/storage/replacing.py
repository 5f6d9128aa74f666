"""Replace a file, a folder, or the files of an export, completely or not at all, if they are
quantizer's or the user allows it. Each function finds out itself whose they are. Imports no
torch.
"""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quantizer.errors import ResultError, UsageError
from quantizer.storage.owned_folder import OwnedFolder
from quantizer.storage.ownership import (
    is_owned,
    owned,
    owned_files,
    owner_of,
    refuse_earlier,
    require_ownable,
    unmark,
)
from quantizer.storage.permission import require_no_input, require_replaceable
from quantizer.storage.system_calls import open_flags, sync_folder, write_synced

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
    parent = _owned_parent(target)
    if parent is not None:
        owner = owner_of(target) or OwnedFolder(parent)
        owner.require_ours(owner.name_of(target))
    elif target.is_file():
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
    parent = _owned_parent(path)
    if owner is not None or parent is None:
        yield owner
    else:
        with owned(parent) as owner:
            yield owner


def _owned_parent(path: Path) -> Path | None:
    """Return the innermost folder with this path that has a list, if any."""
    parents = list(path.parents)[:_MOST_DEPTH]
    return next(filter(is_owned, parents), None)


def _replace_single_file(path: Path, parts: Iterable[bytes]) -> str:
    """Replace a file outside the folders of quantizer, and return its sha256."""
    target = _resolved(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        return _write_to_device(target, parts)
    require_replaceable(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(16)}.tmp")
    digest = write_synced(temporary, parts, old=target)
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
    return _resolved(path.parent) / path.name


def _resolved(path: Path) -> Path:
    """Return a path that is absolute and after links.

    Raises:
        OSError: the links form a circle.
    """
    try:
        return path.resolve()
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


def require_replaceable_folder(path: Path) -> None:
    """Check before work begins that `replaced_folder` will not refuse a folder.

    Raises:
        UsageError: see `replaced_folder`.
        OSError: what is at `path` cannot be read.
    """
    require_no_input(path)
    refuse_earlier(path)
    require_ownable(path)
    if is_owned(path):
        OwnedFolder(path.resolve()).require_only_ours()


@contextmanager
def replaced_files(path: Path, others: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield the path of a new file, of the same name, in a new folder. When the `with` block
    ends, it and all files next to it replace those at `path`. After an error they are removed.

    The folder of `path` never has a new file next to the old file `path`. If the process is
    stopped while they are moved, the next call for `path` completes the moves.

    Args:
        path: the main file.
        others: further files of earlier sets, which are removed if the new set lacks them.

    Raises:
        UsageError: see `replace_file`.
        OSError: the folder that contains `path` cannot be written.
    """
    target = resolve_folder(path)
    files = [target]
    for other in others:
        files.append(target.with_name(other.name))
    with ExitStack() as stack:
        owner = stack.enter_context(owner_to_write(target))
        if owner is None:
            for file in files:
                require_replaceable(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            owner = stack.enter_context(owned_files(target))
            owner.adopt(file.name for file in files)
        names = list(map(owner.name_of, files))
        stack.enter_context(owner.replaced_set(names, main=names[0]))
        new = owner.new_files / names[0]
        new.parent.mkdir(parents=True, exist_ok=True)
        yield new


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill. When the `with` block ends, it replaces the folder at `path`,
    in one call if the system can exchange folders. After an error it is removed.

    Raises:
        UsageError: there is something at `path` that quantizer has not written, or that was
            changed since then.
        OSError: the folder that contains `path` cannot be written.
    """
    require_no_input(path)
    refuse_earlier(path)
    with owned(path) as owner:
        owner.require_only_ours()
        with owner.replaced_set(owner.list.files, is_whole=True) as new:
            yield new


def remove_folder(path: Path) -> None:
    """Remove a folder that quantizer has written, except files that are not listed or were
    changed.

    Raises:
        OSError: it cannot be removed.
    """
    if not is_owned(path):
        return
    with owner_to_write(resolve_folder(path)):
        with owned(path) as owner:
            for name in owner.list.files:
                owner.remove(name)
        unmark(owner.path, remove_folder=True)


def cannot_use(folder: Path, error: OSError) -> ResultError:
    """Return the error for a folder of results that the system refused to make or to use."""
    reason = error.strerror or str(error)
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            reason = f"{path} is not a folder"
    return ResultError(
        f"cannot use {folder} for results: {reason}", help="choose another <--output_dir>"
    )
