"""Say which folders are quantizer's, make an empty folder one of them, and hold its lock while
it is written. Imports no torch.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import UsageError
from quantizer.storage.atomic_write import sync_folder
from quantizer.storage.folder_list import LIST_FILE, FolderList, parse_list
from quantizer.storage.folder_lock import folder_lock
from quantizer.storage.owned_folder import OwnedFolder, refuse_links
from quantizer.storage.positioned_io import open_flags

_LIST_WAIT_S = 1.0
"""Seconds to wait for the list of a folder that another process is making."""
EarlierFiles = Callable[[Path], Mapping[str, str]]
"""Returns the sha256 of each file of a folder that an earlier version, without lists, has
written; or nothing if it has written none.
"""
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


def unlocked(folder: Path) -> OwnedFolder:
    """Return a folder with a list, to ask what may be replaced there. Nothing may be written.

    Raises:
        ResultError: its list is damaged.
    """
    path = folder.resolve()
    place = path / LIST_FILE
    return OwnedFolder(path, parse_list(place.read_bytes(), place))


def listed_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder that quantizer has listed and that are there.

    Raises:
        ResultError: the list is damaged.
    """
    if not is_owned(folder):
        return []
    place = owner_of(folder.resolve() / LIST_FILE) or unlocked(folder)
    return [name for name in place.list.files if (folder / name).is_file()]


def is_owned(folder: Path) -> bool:
    """Return whether a folder has a list."""
    return (folder / LIST_FILE).is_file()


def require_ownable(folder: Path, earlier: EarlierFiles) -> None:
    """Check that a folder is absent, empty, or quantizer's.

    Raises:
        UsageError: it is a file, or holds other files.
        ResultError: its list is damaged.
        OSError: it cannot be read.
    """
    _list_of(Path(os.path.realpath(folder)), earlier)


def _list_of(folder: Path, earlier: EarlierFiles) -> FolderList | None:
    """Return the list of a folder, or a new one; None if the folder is absent.

    Raises:
        UsageError: the folder is a file, or holds files and has no list.
        ResultError: its list is damaged.
        OSError: it cannot be read.
    """
    for parent in (folder, *folder.parents):
        if parent.exists() and not parent.is_dir():
            raise UsageError(
                f"cannot use {folder}: {parent.name} is not a folder",
                help="give another folder",
            )
    if not folder.exists():
        return None
    place = folder / LIST_FILE
    if place.is_symlink():
        raise UsageError(f"{place} is a link, and is not followed", help="remove the link")
    content = _content(place)
    if content:
        return parse_list(content, place)
    files = earlier(folder)
    if files:
        return FolderList(files={name: (digest,) for name, digest in files.items()})
    others = [path.name for path in folder.iterdir() if path.name != LIST_FILE]
    if others:
        raise UsageError(
            f"{folder} holds {min(others)} and is not a folder of quantizer's, so nothing is "
            "written there",
            help="give an empty folder, or one that does not exist",
        )
    return FolderList()


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


def mark(folder: Path, earlier: EarlierFiles) -> None:
    """Make a folder quantizer's: create it if it is absent, and write a list if it has none.

    Raises:
        UsageError: it is a file, or holds other files.
        ResultError: its list is damaged.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(os.path.realpath(folder))
    content = _list_of(place, earlier)
    assert content is not None
    _create_list(place / LIST_FILE, content)


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
    content = parse_list(journal.read_bytes(), journal)
    place = OwnedFolder(main.parent, content, journal.name)
    refuse_links(main.parent, content.work_folder)
    try:
        with folder_lock(main, place.work):
            place.list = parse_list(journal.read_bytes(), journal)
            place.complete()
            yield place
    finally:
        # Last, because it says how the work folder is called, and only when nothing is pending
        if place.list.moves is None:
            journal.unlink(missing_ok=True)


@contextmanager
def owned(folder: Path, earlier: EarlierFiles) -> Iterator[OwnedFolder]:
    """Make a folder quantizer's, hold its lock inside the `with` block, and complete what
    stopped runs have left. A new folder in which nothing was written is removed at the end.

    Raises:
        UsageError: it is a file, or holds other files.
        ResultError: its list is damaged, or another process holds the lock.
        OSError: it cannot be made or written.
    """
    is_new = not folder.exists()
    is_marked = not is_new and is_owned(folder)
    mark(folder, earlier)
    path = Path(os.path.realpath(folder))
    content = _list_of(path, earlier)
    assert content is not None
    place = OwnedFolder(path, content)
    refuse_links(path, content.work_folder)
    try:
        with folder_lock(folder, place.work):
            # Another process may have changed it before this one had the lock
            place.list = parse_list((path / LIST_FILE).read_bytes(), path / LIST_FILE)
            place.complete()
            _held[path] = place
            try:
                yield place
            finally:
                del _held[path]
                with contextlib.suppress(OSError):
                    place.clear()
                    place.forget_missing()
    finally:
        if not is_marked:
            unmark(path, remove_folder=is_new)


def unmark(folder: Path, *, remove_folder: bool) -> None:
    """Remove the list of a folder in which quantizer has written nothing.

    Args:
        folder: which has a list.
        remove_folder: whether the folder is removed, too, if it is empty then.
    """
    with contextlib.suppress(OSError):
        if parse_list((folder / LIST_FILE).read_bytes(), folder / LIST_FILE).files:
            return
        (folder / LIST_FILE).unlink()
        if remove_folder:
            folder.rmdir()
