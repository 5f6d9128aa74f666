"""Open the files of a folder as one consistent set, even if another process replaces the set
meanwhile.

`storage.owned_folder` replaces such sets. It writes the new files to a subfolder, and then the
moves into the list of the folder. From then on the set is the one with these moves done,
whether they are or not. This module moves nothing and takes no lock. Imports no torch.
"""

import hashlib
import json
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.errors import ResultError
from quantizer.storage.folder_list import LIST_FILE, NEW_FILES, Moves, is_name, parse_list
from quantizer.storage.system_calls import REPLACES_OPEN_FILES, open_flags, read_at

_PART_BYTES = 1 << 20
MAX_OPEN_ATTEMPTS = 100
"""How often `open_files` begins again because the set was replaced meanwhile. A replacement
takes milliseconds.
"""
# Without O_NONBLOCK, opening a pipe waits for a writer
_READ_FLAGS = open_flags("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC")


class OpenFile:
    """An open file. It is closed when this object is no longer referred to.

    Attributes:
        path: its path when it was opened, for messages.
        descriptor: of the operating system, to read from at offsets.
        mode: the kind of file and its permissions, as in `os.stat`.
        size: in bytes, when it was opened.
        identity: device and inode, which no other file has while this one is open.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._close_with_self(descriptor)
        status = os.fstat(descriptor)
        self.mode = status.st_mode
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)

    @classmethod
    def open(cls, path: Path) -> "OpenFile":
        """Open a file. Links are followed.

        Raises:
            OSError: it cannot be opened.
        """
        return cls(path, os.open(path, _READ_FLAGS))

    def _close_with_self(self, descriptor: int) -> None:
        """Use this descriptor, and close it when this object is no longer referred to."""
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        # At the end of the process, the system closes it
        self._close.atexit = False

    def continue_with_copy(self) -> None:
        """Replace the open file by a temporary copy: Windows lets no open file be replaced.

        Raises:
            OSError: there is no room for a copy.
        """
        with tempfile.TemporaryFile(buffering=0) as copy:
            copy.writelines(self.parts())
            descriptor = os.dup(copy.fileno())
        self._close()
        self._close_with_self(descriptor)

    def parts(self) -> Iterator[bytes]:
        """Yield the content, part by part."""
        position = 0
        while part := self.read(_PART_BYTES, position):
            position += len(part)
            yield part

    def read(self, count: int, position: int) -> bytes:
        """Return `count` bytes from a position on, or fewer at the end of the file."""
        return read_at(self.descriptor, count, position)

    def content(self) -> bytes:
        """Return the whole content."""
        return b"".join(self.parts())

    def digest(self) -> str:
        """Return the sha256 of the content."""
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(part)
        return digest.hexdigest()


@dataclass(frozen=True)
class FileSetKind:
    """A kind of file set: its index, and how messages are worded.

    Attributes:
        index: the file that lists the others with their sha256.
        changed: what messages say of a file whose sha256 differs from the index, after its
            path.
        missing: the help of messages about a folder without such a set.
        again: the help of messages about a damaged set.
        main: the file that messages name if there is no set; by default the index.
    """

    index: str
    changed: str
    missing: str
    again: str
    main: str = ""


class OpenedFiles:
    """The open files of one set. They stay readable if another process replaces the set.

    Attributes:
        folder: the folder of the set.
        kind: the kind of the set.
        identity: the sha256 of the index. As the index has the sha256 of all other files, sets
            with the same identity have the same content.
    """

    def __init__(
        self, folder: Path, kind: FileSetKind, files: Mapping[str, OpenFile], identity: str
    ) -> None:
        self.folder, self.kind, self.identity = folder, kind, identity
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> OpenFile:
        """Return an open file.

        Raises:
            ResultError: the set has none of this name.
        """
        if name not in self._files:
            raise ResultError(f"{self.folder / name} is missing")
        return self._files[name]

    @property
    def names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(self._files)

    def is_current(self) -> bool:
        """Return whether the folder still has this set.

        Raises:
            ResultError: the folder cannot be read.
        """
        index = _take_snapshot(self.folder, self.kind).index
        return index is not None and index.digest() == self.identity


def open_files(
    folder: Path,
    kind: FileSetKind,
    digests: Callable[[OpenFile], Mapping[str, str]],
    optional: Collection[str] = (),
) -> OpenedFiles:
    """Open the index of a set and the files that it lists, and compare their sha256.

    If another process replaces the set meanwhile, the new set is opened. If a replacement was
    interrupted after it was decided, its files are read from the subfolder.

    Args:
        folder: the folder of the set. It may be a link, but no file in it may.
        kind: the kind of the set.
        digests: returns the sha256 of each file to open, from the open index.
        optional: names of files that are also opened if they exist. Their content is not
            checked.

    Raises:
        ResultError: the set is missing or damaged, has a link, or is replaced again and again.
    """
    # Damage is reported when it is seen twice. The first time, it may be a set that is being
    # replaced: some files are of the old set and others of the new one.
    previous: object = None
    for _ in range(MAX_OPEN_ATTEMPTS):
        snapshot = _take_snapshot(folder, kind)
        files, fault = _open_set(snapshot, folder, kind, digests, optional)
        # `snapshot` keeps its files open, so that no new file can have the inode of one of them
        is_same = snapshot.state == _take_snapshot(folder, kind).state
        if is_same and fault is None:
            return OpenedFiles(folder, kind, files, files[kind.index].digest())
        identities = {name: file.identity for name, file in files.items()}
        current = (snapshot.state, identities)
        if fault is not None and current == previous:
            raise fault
        previous = current
    raise ResultError(
        f"{folder} is written again and again by other runs", help="wait for them"
    )


def _open_set(
    snapshot: "_SetSnapshot",
    folder: Path,
    kind: FileSetKind,
    digests: Callable[[OpenFile], Mapping[str, str]],
    optional: Collection[str],
) -> tuple[dict[str, OpenFile], ResultError | None]:
    """Return the files of a set, and an error about the first that is missing or differs from
    the index; None if there is none.

    Raises:
        ResultError: the index names something else than files in the folder itself.
    """
    index = snapshot.index
    if index is None:
        main = kind.main or kind.index
        if snapshot.open(main) is None:
            return {}, ResultError(f"{folder / main} does not exist", help=kind.missing)
        return {}, ResultError(f"{folder / kind.index} does not exist", help=kind.again)
    listed = digests(index)
    for name in listed:
        if not is_name(name) or "/" in name:
            text = f"{index.path} is damaged: it names {name!r:.80}"
            raise ResultError(text, help=kind.again)
    files = {kind.index: index}
    for name in (*listed, *optional):
        file = snapshot.open(name)
        if file is not None:
            files[name] = file
    for name, digest in listed.items():
        if name not in files:
            return files, ResultError(f"{folder / name} is missing", help=kind.again)
        if files[name].digest() != digest:
            return files, ResultError(f"{folder / name} {kind.changed}", help=kind.again)
    return files, None


class _SetSnapshot:
    """The set in a folder at one moment, with the moves of a replacement that is decided.

    Attributes:
        index: the open index of the set, or None if there is none.
        state: the moves, and the identity of the index. It changes when the set is replaced.
    """

    def __init__(self, folder: Path, kind: FileSetKind) -> None:
        self._folder = folder
        self._new_files = folder
        self._moves = Moves((), ())
        place = _open_if_present(folder / LIST_FILE)
        if place is not None:
            content = parse_list(place.content(), place.path)
            self._moves = content.moves or self._moves
            self._new_files = folder / content.work_folder / NEW_FILES
        self.index = self.open(kind.index)
        self.state = (self._moves, self.index and self.index.identity)

    def open(self, name: str) -> OpenFile | None:
        """Open the file that has this name in the set, or return None if there is none.

        Raises:
            ResultError: it is a link, no regular file, or cannot be read.
        """
        if name in self._moves.files:
            _refuse_link(self._new_files.parent)
            _refuse_link(self._new_files)
            file = _open_if_present(self._new_files / name)
            # It is None if the file has been moved already
            if file is not None:
                return file
        if name in self._moves.gone:
            return None
        return _open_if_present(self._folder / name)


def _take_snapshot(folder: Path, kind: FileSetKind) -> _SetSnapshot:
    """Return the set that is in a folder now.

    Raises:
        ResultError: there is no such folder, it cannot be read, or its list is damaged.
    """
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        path = folder / (kind.main or kind.index)
        raise ResultError(f"{path} does not exist", help=kind.missing) from None
    except OSError as error:
        raise ResultError(f"cannot read {folder}: {error.strerror or error}") from error
    return _SetSnapshot(folder, kind)


def _refuse_link(path: Path) -> None:
    """Raise `ResultError` if a path is a link, which would lead elsewhere."""
    if path.is_symlink():
        help_ = "put the file itself in its place"
        raise ResultError(f"{path} is a link, which is not followed", help=help_)


def _open_if_present(path: Path) -> OpenFile | None:
    """Open a file of a set, or return None if there is none.

    Raises:
        ResultError: it is a link, no regular file, or cannot be read.
    """
    try:
        _refuse_link(path)
        # O_NOFOLLOW, as a link may have taken its place since the check above
        file = OpenFile(path, os.open(path, _READ_FLAGS | open_flags("O_NOFOLLOW")))
        if not stat.S_ISREG(file.mode):
            raise ResultError(f"{path} is not a file", help="remove it")
        if not REPLACES_OPEN_FILES:
            file.continue_with_copy()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}") from error
    return file


def json_digest(value: Any) -> str:
    """Return the sha256 of a JSON value, which does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
