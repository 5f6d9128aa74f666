"""Lock a result folder, and replace its set of files by another one.

All new files are written to a subfolder first. Then a list of moves is written there, and the
files are moved. If the process is stopped in between, the next writer completes the moves. So
the folder has the complete old set or the complete new set at any moment, even if the disk is
full. Readers need no lock: see `storage.opened_files`.
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
from quantizer.storage.files import cannot_use, cannot_write, write_json
from quantizer.storage.folder_lock import folder_lock
from quantizer.storage.opened_files import (
    MOVES_FILE,
    NEW_FILES_FOLDER,
    OpenedFiles,
    check_new_files_folder,
    parse_moves,
)

RESULT_SUFFIXES = (".json", ".py", ".safetensors", ".csv", ".html", ".log")
"""The suffixes of the files in a result folder."""
EXPORT_FOLDER = "export"
"""The only subfolder of a result folder that users see, with the files of `--deploy`."""
REPLACEABLE_NAME = re.compile(
    r"(weights|bias_corr|qparams|rescaled|statistics|model|graph)"
    r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    r"|(quant_info|checksums|plan|config\.resolved|algorithms|quantizer|graph)\.json"
    r"|(report|analysis|tune|exact|export/verify)\.json|report\.html|layers\.csv"
)
"""Matches the names of files that a replacement adds or removes, except for `CODE_NAME`."""
CODE_NAME = re.compile(r"\w+\.py")
"""Matches the name of a network's code, which is the name of the model."""
READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
"""The errors of the system for a disk, a folder or a file that cannot be written."""


class ReadOnlyError(ResultError):
    """The folder can be read but not written."""


@contextmanager
def replace_set(folder: Path, old_names: Collection[str] = ()) -> Iterator[Path]:
    """Yield an empty folder for the files of a new set.

    When the `with` block ends, they replace the files of the same names in `folder`, and the
    other files of the old set are removed: all of this or nothing.

    Args:
        folder: whose files are replaced. The caller holds its lock.
        old_names: the files of the old set.

    Raises:
        ResultError: something cannot be written. The old set is complete then.
    """
    complete_replacement(folder)
    _remove_new_files(folder)
    new_folder = folder / NEW_FILES_FOLDER
    try:
        new_folder.mkdir(parents=True)
        yield new_folder
        new_names = sorted(path.name for path in new_folder.iterdir())
        for name in new_names:
            _require_replaceable(folder, name)
        outgoing = sorted(set(old_names) - set(new_names))
        write_json(new_folder / MOVES_FILE, {"files": new_names, "gone": outgoing})
    except BaseException as error:
        _remove_new_files(folder)
        if isinstance(error, OSError):
            raise cannot_write(folder, error) from error
        raise
    complete_replacement(folder)


def complete_replacement(folder: Path) -> None:
    """Finish an interrupted replacement if its list of moves was already written. Leave an
    incomplete one alone: another process may still be writing it.

    The caller holds the lock of the folder. Nothing is moved before all names are checked.

    Raises:
        ResultError: the list of moves is damaged, or a move would touch a file that is not of
            quantizer.
    """
    check_new_files_folder(folder)
    new_folder = folder / NEW_FILES_FOLDER
    moves = new_folder / MOVES_FILE
    if moves.is_symlink():
        raise ResultError(f"{moves} is a link", help=f"remove {new_folder}")
    if not moves.is_file():
        return
    try:
        incoming, outgoing = parse_moves(moves.read_bytes(), folder)
        for name in (*incoming, *outgoing):
            _require_replaceable(folder, name)
        for name in outgoing:
            (folder / name).unlink(missing_ok=True)
        for name in incoming:
            # It is missing if it was moved before the process was stopped
            with contextlib.suppress(FileNotFoundError):
                os.replace(new_folder / name, folder / name)
        _remove_new_files(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _require_replaceable(folder: Path, name: str) -> None:
    """Check that a file may be replaced or removed: quantizer writes files of this name, and
    the path leads through no link.

    Raises:
        ResultError: naming the file.
    """
    new_folder = folder / NEW_FILES_FOLDER
    target = folder / name
    source = new_folder / name
    # A name such as export/verify.json has a subfolder
    for path in (target.parent, source.parent, target, source):
        if path != folder and path.is_symlink():
            raise ResultError(f"{path} is a link", help="remove the link")
    if CODE_NAME.fullmatch(name):
        # A file of this name may also be the user's own code
        is_ours = not target.is_file() or is_emitted(target.read_text("utf-8", "replace"))
    else:
        is_ours = REPLACEABLE_NAME.fullmatch(name) is not None
    if not is_ours or target.is_dir() or source.is_dir():
        help_ = f"move it to another folder; if there is none of this name, remove {new_folder}"
        raise ResultError(f"{target} is not a file that quantizer writes", help=help_)


def _remove_new_files(folder: Path) -> None:
    """Remove the subfolder for new files. The list of moves goes first: without it, the files
    that are still there are not valid.
    """
    (folder / NEW_FILES_FOLDER / MOVES_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / NEW_FILES_FOLDER, ignore_errors=True)


def _remove_left_over_files(folder: Path) -> None:
    """Complete or remove a replacement that was interrupted, and remove temporary files."""
    complete_replacement(folder)
    _remove_new_files(folder)
    for place in (folder, folder / EXPORT_FOLDER):
        remove_left_over(place)


def _refuse_links(folder: Path) -> None:
    """Check that there are no links among the files of a result folder: a write to one would
    change a file elsewhere.

    Raises:
        ResultError: naming the first.
    """
    folders = [folder]
    export = folder / EXPORT_FOLDER
    for path in (export, *_folders_in(export)):
        if path.is_dir() and not path.is_symlink():
            folders.append(path)
    links: list[Path] = []
    for place in folders:
        links += [path for path in place.iterdir() if path.is_symlink()]
    if links:
        raise ResultError(
            f"{min(links)} is a link, and would be written through", help="remove the link"
        )


def _folders_in(folder: Path) -> Iterator[Path]:
    """Yield all folders below a folder, without following links."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def _refuse_folders(folder: Path) -> None:
    """Check that no folder has the name of a file, and no file the name of the folder for
    exports. They could not be replaced at the end of a run.

    Raises:
        ResultError: naming the first.
    """
    folders: list[Path] = []
    for path in folder.iterdir():
        if path.is_dir() and path.suffix in RESULT_SUFFIXES:
            folders.append(path)
    if folders:
        raise ResultError(
            f"{min(folders)} is a folder instead of a file", help="move it elsewhere"
        )
    export = folder / EXPORT_FOLDER
    if export.exists() and not export.is_dir():
        raise ResultError(
            f"{export} is not a folder, and exports are written there", help="move it elsewhere"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a result folder inside the `with` block. First, remove what interrupted
    runs have left there.

    Raises:
        ReadOnlyError: the folder cannot be written.
        ResultError: another process holds the lock, the folder cannot be made, or has links
            among its files.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_links(folder)
            _refuse_folders(folder)
            stack.enter_context(folder_lock(folder))
        except OSError as error:
            refusal = cannot_use(folder, error)
            if error.errno in READ_ONLY_ERRNOS:
                raise ReadOnlyError(refusal.message, help=refusal.help) from error
            raise refusal from error
        _remove_left_over_files(folder)
        yield


@contextmanager
def locked_as_opened(opened: OpenedFiles) -> Iterator[None]:
    """Hold the lock of the folder of an open set inside the `with` block, to add files about
    this set.

    Raises:
        ResultError: as for `locked`, or another run has replaced the set since it was opened.
    """
    with locked(opened.folder):
        if not opened.is_current():
            text = f"{opened.folder} holds other results than when this command began"
            raise ResultError(text, help="run the command again")
        yield
