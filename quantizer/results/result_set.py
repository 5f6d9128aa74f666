"""Lock a result folder, and replace its set of files by another one. Readers need no lock: see
`storage.opened_files`.
"""

import errno
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quantizer.errors import ResultError
from quantizer.storage.files import cannot_write
from quantizer.storage.opened_files import OpenedFiles
from quantizer.storage.owned_folder import OwnedFolder
from quantizer.storage.ownership import mark, owned, owner_of, require_ownable
from quantizer.storage.replacing import cannot_use

READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
"""The errors of the system for a disk, a folder or a file that cannot be written."""


class ReadOnlyError(ResultError):
    """The folder can be read but not written."""


def require_result_folder(folder: Path) -> None:
    """Check that a folder is absent, empty, or one of results.

    Raises:
        UsageError: it is none of them.
        ResultError: it cannot be read.
    """
    with _refusals(folder):
        require_ownable(folder)


def mark_result_folder(folder: Path) -> None:
    """Make a folder one of results, before its first file is written.

    Raises:
        UsageError: it holds other files.
        ResultError: it cannot be made.
    """
    with _refusals(folder):
        mark(folder)


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Turn what the system says of a folder into a sentence."""
    try:
        yield
    except OSError as error:
        refusal = cannot_use(folder, error)
        if error.errno in READ_ONLY_ERRNOS:
            raise ReadOnlyError(refusal.message, help=refusal.help) from error
        raise refusal from error


@contextmanager
def locked(folder: Path) -> Iterator[OwnedFolder]:
    """Hold the lock of a result folder inside the `with` block. First, complete or remove what
    stopped runs have left there.

    Raises:
        ReadOnlyError: the folder cannot be written.
        UsageError: the folder holds other files than results.
        ResultError: another process holds the lock, or the folder cannot be made.
    """
    with ExitStack() as stack:
        with _refusals(folder):
            place = stack.enter_context(owned(folder))
        yield place


@contextmanager
def replace_set(
    folder: Path, old_names: Collection[str] = (), main: str = ""
) -> Iterator[Path]:
    """Yield an empty folder for the files of a new set. When the `with` block ends, they
    replace the files of the same names in `folder`, and the other files of the old set are
    removed: all of this or nothing.

    Args:
        folder: whose files are replaced.
        old_names: the files of the old set.
        main: the file that readers open first.

    Raises:
        UsageError: a file in the way is not quantizer's. The old set is complete then.
        ResultError: something cannot be written. The old set is complete then.
    """
    with holding(folder) as place:
        try:
            with place.replaced_set(old_names, main) as new_folder:
                yield new_folder
        except OSError as error:
            raise cannot_write(folder, error) from error


@contextmanager
def holding(folder: Path) -> Iterator[OwnedFolder]:
    """Hold the lock of a result folder inside the `with` block, if the caller does not hold it
    already.

    Raises:
        QuantizerError: as for `locked`.
    """
    place = owner_of(folder.resolve() / "file")
    with ExitStack() as stack:
        yield place or stack.enter_context(locked(folder))


@contextmanager
def locked_as_opened(opened: OpenedFiles) -> Iterator[OwnedFolder]:
    """Hold the lock of the folder of an open set inside the `with` block, to add files about
    this set.

    Raises:
        ResultError: as for `locked`, or another run has replaced the set since it was opened.
    """
    with locked(opened.folder) as place:
        if not opened.is_current():
            text = f"{opened.folder} holds other results than when this command began"
            raise ResultError(text, help="run the command again")
        yield place
