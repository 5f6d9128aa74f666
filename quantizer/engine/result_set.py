"""The result folder as a whole: its lock, and a set of files that takes the place of another.

The new set is written aside, complete, then moved; a later start ends what a stop has left undone. So at every moment
there is the old set or the new one, though the disk be full.
"""

import contextlib
import fcntl
import os
import platform
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quantizer.atomic import remove_left_over
from quantizer.engine.result_files import cannot_write, read_json, write_json
from quantizer.errors import ResultError

ASIDE = ".quantizer-new"
"""The folder beside the files, for those that are to replace them."""
MOVES = "moves.json"
"""The last file written there; from then on the new set is the one that counts."""
SUFFIXES = (".json", ".py", ".safetensors", ".csv", ".html", ".log")
"""Those of the files in a result folder."""
OWNER = 100
"""Bytes that a lock may have, which say whose it is."""


@contextmanager
def replaced_set(folder: Path, gone: Collection[str] = ()) -> Iterator[Path]:
    """A folder to write files to that replace those of their names in `folder`, all of them or none; those of the names
    `gone` are removed with that.

    Raises:
        ResultError: something cannot be written; then all is as it was.
    """
    settle(folder)
    _forget(folder)
    aside = folder / ASIDE
    try:
        aside.mkdir(parents=True)
        yield aside
        names = sorted(path.name for path in aside.iterdir())
        write_json(aside / MOVES, {"files": names, "gone": sorted({*gone} - {*names})})
    except BaseException as error:
        _forget(folder)
        if isinstance(error, OSError):
            raise cannot_write(folder, error) from error
        raise
    settle(folder)


def settle(folder: Path) -> None:
    """End a replacement that was stopped once its new set was complete; one that is not, another run may still write.

    Raises:
        ResultError: the folder holds something else under that name.
    """
    aside = folder / ASIDE
    if aside.is_symlink() or (aside.exists() and not aside.is_dir()):
        raise ResultError(f"{aside} is no folder of quantizer", help="remove it")
    if not (aside / MOVES).is_file():
        return
    moves = read_json(aside / MOVES)
    names = {kind: _names(moves, kind, aside) for kind in ("gone", "files")}
    try:
        _move(folder, names)
    except OSError as error:
        raise cannot_write(folder, error) from error
    _forget(folder)


def _move(folder: Path, names: Mapping[str, Collection[str]]) -> None:
    """Remove what is gone, and put the new files in their places.

    Raises:
        OSError: the system refuses.
    """
    for path in (folder / name for name in names["gone"]):
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)
    for name in names["files"]:
        with contextlib.suppress(FileNotFoundError):  # it is where it should be
            os.replace(folder / ASIDE / name, folder / name)


def finish(folder: Path) -> None:
    """The same of a result folder that nobody writes to, for those who are about to read it.

    Raises:
        ResultError: someone does, or the folder holds something else under that name.
    """
    if (folder / ASIDE / MOVES).is_file():
        with locked(folder):
            pass  # who takes the lock cleans up


def _forget(folder: Path) -> None:
    """Remove what was written aside, first what says that it is complete."""
    (folder / ASIDE / MOVES).unlink(missing_ok=True)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def _names(moves: object, kind: str, aside: Path) -> list[str]:
    """Names of files in the folder, or in one inside it.

    Raises:
        ResultError: `moves` is nothing that was written here.
    """
    found = moves.get(kind) if isinstance(moves, dict) else None
    if not isinstance(found, list) or not all(isinstance(name, str) and _is_plain(name) for name in found):
        raise ResultError(f"{aside / MOVES} is damaged", help=f"remove {aside}")
    return found


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part == os.path.basename(part) and part[0] != "." for part in parts)


def _clean(folder: Path) -> None:
    """Remove what stopped runs have left: temporary files, and a replacement that was not complete."""
    settle(folder)
    _forget(folder)
    for place in (folder, folder / "export"):
        remove_left_over(place)


def _refuse_links(folder: Path) -> None:
    """Refuse a folder with links among its files: what is written to them would be written elsewhere.

    Raises:
        ResultError: naming the first.
    """
    links = sorted(path.name for path in folder.iterdir() if path.is_symlink())
    if links:
        raise ResultError(f"{folder / links[0]} is a link, and would be written through", help="remove the link")


def _refuse_folders(folder: Path) -> None:
    """Refuse a folder that holds a folder in place of a file, which could not be replaced at the end of a run.

    Raises:
        ResultError: naming the first.
    """
    names = (path.name for path in folder.iterdir() if path.is_dir() and path.suffix in SUFFIXES)
    first = min(names, default=None)
    if first is not None:
        raise ResultError(f"{folder / first} is a folder in place of a file", help="move it elsewhere")
    export = folder / "export"
    if export.exists() and not export.is_dir():
        raise ResultError(f"{export} is no folder, and exports are written there", help="move it elsewhere")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process ends in whatever way; what stopped runs have
    left there is gone.

    Raises:
        ResultError: another process holds it, it cannot be made, or has links among its files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_links(folder)
        _refuse_folders(folder)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise ResultError(
            f"cannot use {folder} for results: {error.strerror}", help="choose another --output_dir"
        ) from error
    try:
        _take(handle, folder)
        try:
            _clean(folder)
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    """Lock the open file, if it is still the folder's: its last owner may have removed it in the meantime."""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise ResultError(f"{folder / '.lock'} is no file, so it cannot be locked", help="remove it")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owned = os.fstat(handle).st_ino == (folder / ".lock").stat().st_ino
    except OSError:
        owned = False
    if not owned:
        owner = os.pread(handle, OWNER, 0).decode(errors="replace")
        said = f", {owner}" if owner.isprintable() and owner else ""
        raise ResultError(f"{folder} is in use by another run{said}", help="wait for it or choose another --output_dir")
    # A full disk has no room for the text, which is for people alone: the lock holds without it.
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode()[:OWNER])
