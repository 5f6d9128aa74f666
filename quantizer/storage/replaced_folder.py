"""Replace a folder, or the files of an export, completely or not at all, as `replacing` does
with one file. Imports no torch.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quantizer.storage.ownership import (
    is_owned,
    owned,
    owned_files,
    require_ownable,
    unlocked,
    unmark,
)
from quantizer.storage.permission import require_no_input, require_replaceable
from quantizer.storage.replacing import no_earlier_files, owner_to_write, resolve_folder


def require_replaceable_folder(path: Path) -> None:
    """Check before work begins that `replaced_folder` will not refuse a folder.

    Raises:
        UsageError: see `replaced_folder`.
        OSError: what is at `path` cannot be read.
    """
    require_no_input(path)
    require_ownable(path, no_earlier_files)
    if is_owned(path):
        unlocked(path).require_only_ours()


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
    with owned(path, no_earlier_files) as owner:
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
        with owned(path, no_earlier_files) as owner:
            for name in owner.list.files:
                owner.remove(name)
        unmark(owner.path, remove_folder=True)
