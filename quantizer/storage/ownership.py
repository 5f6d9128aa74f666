"""Say which folders are quantizer's, make an empty folder one of them, and hold its lock while
it is written. Imports no torch.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import ResultError, UsageError
from quantizer.storage.folder_list import (
    LIST_FILE,
    LOCK,
    FolderList,
    is_digest,
    is_name,
    parse_list,
)
from quantizer.storage.opened_files import OpenFile
from quantizer.storage.owned_folder import OwnedFolder, refuse_links
from quantizer.storage.permission import is_input
from quantizer.storage.system_calls import open_flags, sync_folder

_OWNER_BYTES = 100
_LIST_WAIT_S = 1.0
"""Seconds to wait for the list of a folder that another process is making."""
_EARLIER_INDEXES = (
    ("checksums.json", "quant_info.json"),
    ("quantizer.json", "model.safetensors"),
)
"""The indexes of the folders that versions before 0.20, without lists, have written, each with
a file that it lists.
"""
CHECKED_IN = "export/deploy.json"
"""A file of a run that users keep in their repository. A clone has it, and no list."""
_held: dict[Path, OwnedFolder] = {}
"""The folders whose locks this process holds."""


def owner_of(path: Path) -> OwnedFolder | None:
    """Return the innermost folder with this path whose lock this process holds, if any.

    Args:
        path: absolute and after links.
    """
    for parent in path.parents:
        if parent in _held:
            return _held[parent]
    return None


def listed_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder that quantizer has listed and that are there.

    Raises:
        ResultError: the list is damaged.
    """
    if not is_owned(folder):
        return []
    place = owner_of(folder.resolve() / LIST_FILE) or OwnedFolder(folder.resolve())
    return [name for name in place.list.files if (folder / name).is_file()]


def listed_files(folder: Path, prefix: str) -> list[Path]:
    """Return the files that quantizer has written to a folder whose names begin in this way."""
    names = sorted(listed_names(folder))
    return [folder / name for name in names if name.startswith(prefix)]


def is_owned(folder: Path) -> bool:
    """Return whether a folder has a list."""
    return (folder / LIST_FILE).is_file()


def require_ownable(folder: Path) -> None:
    """Check that a folder is absent, quantizer's, or has only what a clone may have.

    Raises:
        UsageError: it is a file, or holds other files.
        ResultError: its list is damaged.
        OSError: it cannot be read.
    """
    folder = Path(os.path.realpath(folder))
    for parent in (folder, *folder.parents):
        if parent.exists() and not parent.is_dir():
            raise UsageError(
                f"cannot use {folder}: {parent.name} is not a folder",
                help="give another folder",
            )
    if folder.exists():
        _list_of(folder)


def refuse_earlier(folder: Path) -> None:
    """Refuse the results of a version without lists, which only a calibration replaces.

    Raises:
        UsageError: the folder holds such results.
    """
    if not is_owned(folder) and _earlier_files(folder):
        raise UsageError(
            f"{folder} holds results of a version before 0.20, so nothing is written there",
            help="give an empty folder, or one that does not exist",
        )


def _list_of(folder: Path) -> FolderList:
    """Return the list of a folder, or a new one.

    Raises:
        UsageError: the folder holds files and has no list.
        ResultError: its list is damaged.
        OSError: it cannot be read.
    """
    place = folder / LIST_FILE
    if place.is_symlink():
        raise UsageError(f"{place} is a link, and is not followed", help="remove the link")
    content = _content(place)
    if content:
        return parse_list(content, place)
    files = _earlier_files(folder)
    if files:
        return FolderList(files={name: (digest,) for name, digest in files.items()})
    others = [path.name for path in folder.iterdir() if not _may_be_cloned(path)]
    if others:
        raise UsageError(
            f"{folder} holds {min(others)} and is not a folder of quantizer's, so nothing is "
            "written there",
            help="give an empty folder, or one that does not exist",
        )
    checked_in = folder / CHECKED_IN
    if not checked_in.is_file():
        return FolderList()
    return FolderList(files={CHECKED_IN: (OpenFile.open(checked_in).digest(),)})


def _may_be_cloned(path: Path) -> bool:
    """Return whether a clone of the user's repository may have this in a folder of results: the
    run's config, `CHECKED_IN`, git's own files.
    """
    if path.is_dir():
        return [*path.iterdir()] == [path.parent / CHECKED_IN]
    is_known = path.name.startswith((".git", LIST_FILE))
    return is_known or (path.suffix == ".json" and is_input(path))


def _content(place: Path) -> bytes:
    """Return the content of a list, or nothing if there is none. Wait for a list that another
    process is writing.
    """
    deadline = time.monotonic() + _LIST_WAIT_S
    while True:
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            return b""
        if content or time.monotonic() > deadline:
            return content
        time.sleep(_LIST_WAIT_S / 100)


def _earlier_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of the files that a version without lists has written to a folder, as
    far as an index lists them; nothing if there is no index.
    """
    for index, listed in _EARLIER_INDEXES:
        place = folder / index
        if not place.is_file() or place.is_symlink():
            continue
        content = place.read_bytes()
        try:
            files = dict(json.loads(content)["files"])
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        is_sound = all(map(is_name, files)) and all(map(is_digest, files.values()))
        if listed in files and is_sound:
            return {**files, index: hashlib.sha256(content).hexdigest()}
    return {}


def mark(folder: Path) -> None:
    """Make a folder quantizer's: create it if it is absent, and write a list if it has none.

    Raises:
        UsageError: it is a file, or holds other files.
        ResultError: its list is damaged.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(os.path.realpath(folder))
    _create_list(place / LIST_FILE, _list_of(place))


def _create_list(place: Path, content: FolderList) -> None:
    """Write a list where there is none."""
    try:
        flags = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW")
        descriptor = os.open(place, flags, 0o666)
    except FileExistsError:
        if _content(place):
            return
        # A process was stopped between the creation of the list and its first byte
        descriptor = os.open(place, open_flags("O_WRONLY", "O_NOFOLLOW"))
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.content())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(place.parent)


@contextmanager
def owned_files(main: Path) -> Iterator[OwnedFolder]:
    """Hold a list and a lock of a set of files outside the folders of quantizer. The list is
    next to the main file for as long as the set is replaced.

    Args:
        main: of the set; absolute and after links.

    Raises:
        ResultError: the list is damaged, or another process holds the lock.
        OSError: the folder cannot be written.
    """
    journal = main.with_name(f".{main.name}{LIST_FILE}")
    _create_list(journal, FolderList())
    place = OwnedFolder(main.parent, journal.name)
    try:
        with _locked(place, main):
            yield place
    finally:
        # Last, because it says how the work folder is called, and only when nothing is pending
        if place.list.moves is None:
            journal.unlink(missing_ok=True)


@contextmanager
def owned(folder: Path) -> Iterator[OwnedFolder]:
    """Make a folder quantizer's, hold its lock inside the `with` block, and complete what
    stopped runs have left. A new folder in which nothing was written is removed at the end.

    Raises:
        UsageError: it is a file, or holds other files.
        ResultError: its list is damaged, or another process holds the lock.
        OSError: it cannot be made or written.
    """
    is_new = not folder.exists()
    is_marked = not is_new and is_owned(folder)
    mark(folder)
    place = OwnedFolder(Path(os.path.realpath(folder)))
    try:
        with _locked(place, folder):
            _held[place.path] = place
            try:
                yield place
            finally:
                del _held[place.path]
                with contextlib.suppress(OSError):
                    place.clear()
                    place.forget_missing()
    finally:
        if not is_marked:
            unmark(place.path, remove_folder=is_new)


def unmark(folder: Path, *, remove_folder: bool) -> None:
    """Remove the list of a folder in which quantizer has written nothing.

    Args:
        folder: which has a list.
        remove_folder: whether the folder is removed, too, if it is empty then.
    """
    with contextlib.suppress(OSError):
        if OwnedFolder(folder).list.files:
            return
        (folder / LIST_FILE).unlink()
        if remove_folder:
            folder.rmdir()


@contextmanager
def _locked(place: OwnedFolder, named: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the `with` block, after completing what stopped runs
    have left. The system releases it even if the process is killed.

    Args:
        place: the folder. Its work folder, with the lock file, is made, and removed at the end
            if it is empty.
        named: what messages call it.

    Raises:
        OSError: the lock file cannot be created or opened.
        ResultError: another process holds the lock.
    """
    # Most commands lock nothing
    from filelock import FileLock, Timeout, UnixFileLock

    refuse_links(place.path, place.list.work_folder)
    path = place.work / LOCK
    lock = FileLock(path, timeout=0)
    while not lock.is_locked:
        place.work.mkdir(exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:
            # A process that ends has removed the subfolder meanwhile
            continue
        except Timeout:
            raise ResultError(
                f"{named} is in use by another run{_owner(path)}",
                help="wait for it or choose another <--output_dir>",
            ) from None
    # The other classes of filelock write to the lock file themselves, and remove it
    is_unix = isinstance(lock, UnixFileLock)
    try:
        if is_unix:
            # For messages. If the disk is full, the file stays empty: it needs no content
            owner = f"process {os.getpid()} on {platform.node()}"
            with contextlib.suppress(OSError):
                path.write_bytes(owner.encode()[:_OWNER_BYTES])
        # Another process may have changed it before this one had the lock
        place.read_list()
        place.complete()
        yield
    finally:
        try:
            if is_unix:
                path.unlink(missing_ok=True)
        finally:
            lock.release()
        # Another process may have made a lock file in it meanwhile
        with contextlib.suppress(OSError):
            place.work.rmdir()


def _owner(path: Path) -> str:
    """Return ", process 123 on host" as the lock file says it, or "" if it says nothing."""
    content = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        content = file.read(_OWNER_BYTES)
    owner = content.decode(errors="replace")
    return f", {owner}" if owner.isprintable() and owner else ""
