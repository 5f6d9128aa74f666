"""The result folder as a whole: its lock, and a set of files that takes the place of another.

The new set is written aside, complete, then moved; a later start ends what a stop has left
undone. So at every moment there is the old set or the new one, though the disk be full. Readers
take either (`opened_files`) and move nothing.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import ResultError
from quantizer.graph.emit import is_emitted
from quantizer.storage.atomic_write import remove_left_over
from quantizer.storage.files import cannot_write, write_json
from quantizer.storage.folder_lock import folder_lock
from quantizer.storage.opened_files import (
    ASIDE,
    MOVES,
    OpenedFiles,
    planned_moves,
    require_aside,
)

SUFFIXES = (".json", ".py", ".safetensors", ".csv", ".html", ".log")
"""Those of the files in a result folder."""
EXPORT = "export"
"""The only folder inside a result folder that is written to."""
OURS = re.compile(
    r"(weights|bias_corr|qparams|rescaled|statistics|model|graph)"
    r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|(quant_info|checksums|plan|config\.resolved|algorithms|quantizer|graph)\.json"
    r"|(report|analysis|exact|export/verify)\.json|report\.html|layers\.csv"
)
"""Names of files in a set that replaces another, or that go with one; code of a network has its
model's name.
"""
CODE = re.compile(r"\w+\.py")
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system says of a disk, a folder and a file that may be read alone."""


class ReadOnlyError(ResultError):
    """The folder may be read but not written."""


@contextmanager
def replaced_set(folder: Path, gone: Collection[str] = ()) -> Iterator[Path]:
    """Yield a folder to write files to.

    At the end they replace those of their names in `folder`, all of them or none, and those of
    the names `gone` are removed.

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
        for name in names:
            _require_ours(folder, name)
        write_json(aside / MOVES, {"files": names, "gone": sorted({*gone} - {*names})})
    except BaseException as error:
        _forget(folder)
        if isinstance(error, OSError):
            raise cannot_write(folder, error) from error
        raise
    settle(folder)


def settle(folder: Path) -> None:
    """Finish a replacement that was stopped after its new set was complete. An incomplete one
    is left alone.

    For writers, who hold the lock. Nothing is moved before all names and places are checked.

    Raises:
        ResultError: the folder holds something else under that name, or the list has what no
            writer puts there.
    """
    require_aside(folder)
    aside = folder / ASIDE
    moves = aside / MOVES
    if moves.is_symlink():
        raise ResultError(f"{moves} is a link", help=f"remove {aside}")
    if not moves.is_file():
        return
    try:
        incoming, outgoing = planned_moves(moves.read_bytes(), folder)
        for name in (*incoming, *outgoing):
            _require_ours(folder, name)
        for name in outgoing:
            (folder / name).unlink(missing_ok=True)
        for name in incoming:
            with contextlib.suppress(FileNotFoundError):  # it is where it should be
                os.replace(aside / name, folder / name)
        _forget(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _require_ours(folder: Path, name: str) -> None:
    """Refuse to move or remove a file that no writer of sets moves or removes, or that is in
    another folder.

    Raises:
        ResultError: naming the file.
    """
    target, source = folder / name, folder / ASIDE / name
    inside = [path for path in (target.parent, source.parent) if path != folder]
    for path in (*inside, target, source):
        if path.is_symlink():
            raise ResultError(f"{path} is a link", help="remove the link")
    if CODE.fullmatch(name):
        is_ours = not target.is_file() or is_emitted(target.read_text("utf-8", "replace"))
    else:
        is_ours = OURS.fullmatch(name) is not None
    if not is_ours or target.is_dir() or source.is_dir():
        help_ = (
            f"move it to another folder; if there is none of this name, remove {folder / ASIDE}"
        )
        raise ResultError(f"{target} is not a file that quantizer writes", help=help_)


def _forget(folder: Path) -> None:
    """Remove what was written aside, first what says that it is complete."""
    (folder / ASIDE / MOVES).unlink(missing_ok=True)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def _clean(folder: Path) -> None:
    """Remove what stopped runs have left: temporary files, and a replacement that was not
    complete.
    """
    settle(folder)
    _forget(folder)
    for place in (folder, folder / EXPORT):
        remove_left_over(place)


def _refuse_links(folder: Path) -> None:
    """Refuse a folder with links among the files that we write: what is written to them would
    be written elsewhere.

    Raises:
        ResultError: naming the first.
    """
    places = [folder]
    for place in (folder / EXPORT, *_folders_in(folder / EXPORT)):
        if place.is_dir() and not place.is_symlink():
            places.append(place)
    links: list[Path] = []
    for place in places:
        links += [path for path in place.iterdir() if path.is_symlink()]
    if links:
        raise ResultError(
            f"{min(links)} is a link, and would be written through", help="remove the link"
        )


def _folders_in(folder: Path) -> Iterator[Path]:
    """Yield all folders below this one; links to folders are not followed."""
    for place, names, _ in os.walk(folder):
        yield from (Path(place, name) for name in names)


def _refuse_folders(folder: Path) -> None:
    """Refuse a folder that holds a folder in place of a file, which could not be replaced at
    the end of a run.

    Raises:
        ResultError: naming the first.
    """
    names = (
        path.name for path in folder.iterdir() if path.is_dir() and path.suffix in SUFFIXES
    )
    first = min(names, default=None)
    if first is not None:
        raise ResultError(
            f"{folder / first} is a folder instead of a file", help="move it elsewhere"
        )
    export = folder / "export"
    if export.exists() and not export.is_dir():
        raise ResultError(
            f"{export} is not a folder, and exports are written there", help="move it elsewhere"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process ends in whatever way;
    what stopped runs have left there is gone.

    Raises:
        ResultError: another process holds it, it cannot be made, or has links among its files.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_links(folder)
            _refuse_folders(folder)
            stack.enter_context(folder_lock(folder))
        except OSError as error:
            kind = ReadOnlyError if error.errno in READ_ONLY else ResultError
            text = f"cannot use {folder} for results: {error.strerror}"
            raise kind(text, help="choose another --output_dir") from error
        _clean(folder)
        yield


@contextmanager
def locked_as_opened(opened: OpenedFiles) -> Iterator[None]:
    """Hold the lock of the folder that these files were opened in, to write about them.

    Raises:
        ResultError: as `locked` says, or another run has replaced the files since they were
            opened.
    """
    with locked(opened.folder):
        if not opened.is_current():
            text = f"{opened.folder} holds other results than when this command began"
            raise ResultError(text, help="run the command again")
        yield
