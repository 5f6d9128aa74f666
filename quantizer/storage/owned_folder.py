"""Replace and remove the files of a folder that quantizer has written, and no others.

A folder is quantizer's if it has a list (`storage.folder_list`), which it gets while it is
empty. A file in it may be replaced or removed if the list has its name and its sha256. New
files are written to the work folder, a subfolder whose name the list has. Then they are moved.
If the process is stopped in between, the next writer completes the moves that the list has, and
removes the rest. Imports no torch.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quantizer.errors import UsageError
from quantizer.storage.folder_list import (
    LIST_FILE,
    LOCK,
    NEW_FILES,
    FolderList,
    Moves,
    is_name,
    parse_list,
)
from quantizer.storage.opened_files import OpenFile
from quantizer.storage.permission import may_overwrite, require_no_input
from quantizer.storage.system_calls import exchange, sync_file, sync_folder, write_synced


class OwnedFolder:
    """A folder of quantizer's. What writes needs its lock.

    Args:
        path: of the folder, absolute and after links.
        list_file: the name of the file of its list.

    Attributes:
        list: of its files.

    Raises:
        ResultError: the list is damaged.
    """

    list: FolderList

    def __init__(self, path: Path, list_file: str = LIST_FILE) -> None:
        self.path = path
        self._list_file = path / list_file
        self.read_list()
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}
        """The sha256 of files that this process has read or written, with what the system says
        of the file.
        """

    def read_list(self) -> None:
        """Read the list again, which another process may have changed.

        Raises:
            ResultError: it is damaged.
        """
        self.list = parse_list(self._list_file.read_bytes(), self._list_file)

    @property
    def work(self) -> Path:
        """Return the subfolder for files that are not complete."""
        return self.path / self.list.work_folder

    @property
    def new_files(self) -> Path:
        """Return the subfolder for the files of a set that is not complete."""
        return self.work / NEW_FILES

    @property
    def _sibling(self) -> Path:
        """Return the path of a new folder just before it is exchanged with this one."""
        return self.path.with_name(f".{self.path.name}.{self.list.token}.tmp")

    def name_of(self, path: Path) -> str:
        """Return the name of a file in this folder, such as `export/verify.json`."""
        return path.relative_to(self.path).as_posix()

    def require_ours(self, *names: str, is_strict: bool = False) -> None:
        """Check that files may be replaced or removed.

        Args:
            names: of the files, which need not exist.
            is_strict: whether `--overwrite` allows nothing.

        Raises:
            UsageError: one is not a file that quantizer has written there, was changed since
                then, or is an input of the run. `--overwrite` allows the first two.
            OSError: one cannot be read.
        """
        allows_all = may_overwrite() and not is_strict
        changed: list[str] = []
        foreign: list[str] = []
        for name in names:
            refuse_links(self.path, name)
            path = self.path / name
            if not path.exists():
                continue
            if not path.is_file():
                raise UsageError(
                    f"{path} is not a file, so it is not replaced",
                    help="move it to another folder",
                )
            require_no_input(path)
            if allows_all or self._digest(name) in self.list.files.get(name, ()):
                continue
            if name in self.list.files:
                changed.append(name)
            else:
                foreign.append(name)
        for kind, fault in ((foreign, "quantizer has not written"), (changed, "were changed")):
            if kind:
                raise UsageError(
                    f"{self.path} holds files that {fault}: {', '.join(kind)}",
                    help="move them to another folder, or replace them with <--overwrite>",
                )

    def require_folder(self, name: str) -> None:
        """Check that a name is free or that of a folder.

        Raises:
            UsageError: it is something else.
        """
        refuse_links(self.path, name)
        path = self.path / name
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is not a folder", help="move it to another folder")

    def write(self, name: str, parts: Iterable[bytes]) -> str:
        """Write or replace a file, and return its sha256. At any moment, the folder has the
        complete old file or the complete new one.

        Raises:
            UsageError: see `require_ours`.
            OSError: it cannot be written.
        """
        self.require_ours(name)
        temporary = self.work / "file"
        temporary.unlink(missing_ok=True)
        digest = write_synced(temporary, parts, old=self.path / name)
        self.take(temporary, name, digest)
        return digest

    def write_new(self, path: Path, parts: Iterable[bytes]) -> str:
        """Write a file in the work folder, and return its sha256."""
        digest = write_synced(path, parts)
        self._digests[path.as_posix()] = (_state(path), digest)
        return digest

    def take(self, path: Path, name: str, digest: str) -> None:
        """Move a file of the work folder to its place. At any moment, the folder has the
        complete old file or the complete new one.

        Args:
            path: of a file that is on the disk.
            name: of the file that it replaces.
            digest: the sha256 of the new file.

        Raises:
            UsageError: see `require_ours`.
            OSError: it cannot be moved.
        """
        target = self.path / name
        try:
            self.require_ours(name)
            if not is_name(name):
                raise UsageError(f"{target} cannot be written: quantizer has no such names")
            # Listed before it is replaced, with the new sha256 and the present one
            allowed = self._allowed(name, digest)
            if self.list.files.get(name) != allowed:
                self._write_list(replace(self.list, files={**self.list.files, name: allowed}))
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
        finally:
            path.unlink(missing_ok=True)
        sync_folder(target.parent)
        self._digests[name] = (_state(target), digest)

    def remove(self, name: str) -> None:
        """Remove a file, if it is listed and was not changed.

        Raises:
            UsageError: a link is on the way to it.
            OSError: it cannot be removed.
        """
        refuse_links(self.path, name)
        path = self.path / name
        if path.is_file() and self._digest(name) in self.list.files.get(name, ()):
            path.unlink()

    @contextmanager
    def replaced_set(
        self, gone: Collection[str] = (), main: str = "", *, is_whole: bool = False
    ) -> Iterator[Path]:
        """Yield an empty folder for new files. When the `with` block ends, they replace the
        files of their names, and the files `gone` are removed: all of this or nothing.

        Args:
            gone: the names of files that the new set may lack. Only listed ones are removed.
            main: the name of the file that readers open first. There is none while the others
                are replaced.
            is_whole: whether this folder has no other files than old and new ones. It is
                exchanged in one call then, if the system can do that.

        Raises:
            UsageError: see `require_ours`. Nothing is replaced then.
            OSError: something cannot be written. The old files are complete then.
        """
        self.clear()
        # A whole folder has its name from the beginning: messages call it so
        new = self.new_files / self.path.name if is_whole else self.new_files
        new.mkdir(parents=True)
        try:
            yield new
            digests = self._new_digests(new)
            removed = sorted(set(gone) & self.list.files.keys() - digests.keys())
            self.require_ours(*removed, *digests)
            if is_whole:
                # The user may have put a file there since the work began
                self.require_only_ours()
            if digests and not (is_whole and self._exchange(new, digests)):
                self._decide(digests, removed, main)
        except BaseException:
            self.clear()
            raise
        self.complete()

    def _new_digests(self, new: Path) -> dict[str, str]:
        """Return the sha256 of each new file by its name, after writing it to the disk."""
        digests: dict[str, str] = {}
        for path in sorted(new.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                sync_folder(path)
                continue
            name = path.relative_to(new).as_posix()
            if not is_name(name):
                raise UsageError(f"{path} cannot be written: quantizer has no such names")
            state, digest = self._digests.get(path.as_posix(), ((), ""))
            if state != _state(path):
                # Another library has written it
                sync_file(path)
                digest = OpenFile.open(path).digest()
            digests[name] = digest
        sync_folder(new)
        return digests

    def _exchange(self, new: Path, digests: Mapping[str, str]) -> bool:
        """Exchange this folder and that of the new files.

        Returns:
            Whether the system can. If not, the new files are where `complete` looks for them.
        """
        content = FolderList(self.list.token, {name: (digests[name],) for name in digests})
        write_synced(new / LIST_FILE, [content.content()])
        os.rename(new, self._sibling)
        if exchange(self._sibling, self.path):
            sync_folder(self.path.parent)
            self.list = content
            return True
        self.new_files.rmdir()
        os.rename(self._sibling, self.new_files)
        (self.new_files / LIST_FILE).unlink()
        return False

    def _decide(self, digests: Mapping[str, str], gone: Collection[str], main: str) -> None:
        """Write the moves of the new files into the list."""
        files = dict(self.list.files)
        for name, digest in digests.items():
            files[name] = self._allowed(name, digest)
        for name in gone:
            if (self.path / name).is_file():
                files[name] = (self._digest(name),)
        order = sorted(digests, key=lambda name: (name != main, name))
        moves = Moves(tuple(order), tuple(gone))
        self._write_list(replace(self.list, files=files, moves=moves))

    def complete(self) -> None:
        """Complete the moves in the list, if it has any, and empty the work folder.

        Raises:
            UsageError: a file was put in the way after the moves were decided.
            OSError: something cannot be moved.
        """
        moves = self.list.moves
        if moves is not None:
            pending: list[str] = []
            for name in moves.files:
                refuse_links(self.work, f"{NEW_FILES}/{name}")
                if (self.new_files / name).is_file():
                    pending.append(name)
            # The list has been read from the folder, which may come from anyone
            self.require_ours(*moves.gone, *pending, is_strict=True)
            for name in moves.gone:
                (self.path / name).unlink(missing_ok=True)
            self._move(pending, main=moves.files[0])
            files = dict(self.list.files)
            for name in moves.gone:
                del files[name]
            for name in moves.files:
                files[name] = files[name][-1:]
            self._write_list(replace(self.list, files=files, moves=None))
        self.clear()

    def _move(self, names: Collection[str], main: str) -> None:
        """Move new files to their places. A new file is never next to the main file of old
        ones, which stays in the work folder until the end.
        """
        if main in names and len(names) > 1:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path / main, self.work / "old")
        for name in sorted(names, key=lambda name: name == main):
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.new_files / name, target)
            sync_folder(target.parent)

    def forget_missing(self) -> None:
        """Shorten the list to the files that are there, each with its last sha256."""
        files: dict[str, tuple[str, ...]] = {}
        for name, digests in self.list.files.items():
            if (self.path / name).is_file():
                files[name] = digests[-1:]
        if files != self.list.files and self.list.moves is None:
            self._write_list(replace(self.list, files=files))

    def adopt(self, names: Iterable[str]) -> None:
        """List files that are there, which the user has allowed to replace."""
        files = dict(self.list.files)
        for name in names:
            if (self.path / name).is_file():
                files[name] = (self._digest(name),)
        self.list = replace(self.list, files=files)

    def _allowed(self, name: str, digest: str) -> tuple[str, ...]:
        """Return what the list says of a file that is about to be replaced."""
        if not (self.path / name).is_file():
            return (digest,)
        present = self._digest(name)
        return (digest,) if present == digest else (present, digest)

    def _digest(self, name: str) -> str:
        """Return the sha256 of a file. One that this process knows is not read again."""
        path = self.path / name
        state = _state(path)
        known_state, digest = self._digests.get(name, ((), ""))
        if state != known_state:
            digest = OpenFile.open(path).digest()
            self._digests[name] = (state, digest)
        return digest

    def _write_list(self, content: FolderList) -> None:
        """Replace the list."""
        temporary = self.work / "list"
        temporary.unlink(missing_ok=True)
        write_synced(temporary, [content.content()])
        before = self.list
        # First, because Ctrl-C may end this function after the next line
        self.list = content
        try:
            os.replace(temporary, self._list_file)
        except OSError:
            self.list = before
            raise
        sync_folder(self.path)

    def clear(self) -> None:
        """Remove what is in the work folder, except the lock, and what is left of an exchange.
        The names of both contain the token, so no other program has written there. Files that
        are still to be moved stay.
        """
        if self.list.moves is not None:
            return
        shutil.rmtree(self._sibling, ignore_errors=True)
        if not self.work.is_dir():
            return
        for path in self.work.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()

    def require_only_ours(self) -> None:
        """Check that the folder has no files but listed ones that were not changed.

        Raises:
            UsageError: naming one.
        """
        for path in sorted(self.path.rglob("*")):
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder or self.work in path.parents or path == self.path / LIST_FILE:
                continue
            name = self.name_of(path)
            if name not in self.list.files:
                raise UsageError(
                    f"{path} is not a file that quantizer has written, and the whole folder is "
                    "replaced",
                    help="move it to another folder, or give another path",
                )
            self.require_ours(name)


def refuse_links(folder: Path, name: str) -> None:
    """Check that no link is on the way from a folder to a file: it would lead elsewhere.

    Raises:
        UsageError: naming the link.
    """
    path = folder
    for part in name.split("/"):
        path /= part
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and is not followed", help="remove the link")


def _state(path: Path) -> tuple[int, ...]:
    """Return what the system says of a file, which changes with its content."""
    status = path.stat()
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
