"""Opens the files of a folder as one set: a reader sees what one writer left, whatever is
written meanwhile.

Moves nothing and takes no lock; `results.result_set` writes such sets. Imports no torch.
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
from quantizer.storage.positioned_io import REPLACES_OPEN_FILES, open_flags, read_at

ASIDE = ".quantizer-new"
"""The folder beside the files, for those that are to replace them."""
MOVES = "moves.json"
"""The last file written there; from then on the files aside are the ones that count."""
_PART = 1 << 20
ATTEMPTS = 100
"""A writer moves its files within milliseconds; who meets so many writers gives up."""
# A pipe would keep the opener waiting for a writer.
_READING = open_flags("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC")


class OpenFile:
    """A regular file, open for as long as somebody holds this object; no link is followed to
    it.

    Attributes:
        path: where it was found, for messages.
        descriptor: of the operating system, to read from at offsets.
        mode: the kind of file and its rights, as in `os.stat`.
        size: in bytes, when it was opened.
        identity: device and inode, which no other file has while this one is open.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._hold(descriptor)
        status = os.fstat(descriptor)
        self.mode = status.st_mode
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)

    @classmethod
    def at(cls, path: Path) -> "OpenFile":
        """Open a file of the user's, where a link is as good as what it leads to.

        Raises:
            OSError: it cannot be opened.
        """
        return cls(path, os.open(path, _READING))

    def _hold(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    def release(self) -> None:
        """Go on with a copy, so that Windows lets the file itself be replaced.

        Raises:
            OSError: there is no room for a copy.
        """
        with tempfile.TemporaryFile(buffering=0) as copy:
            copy.writelines(self.parts())
            descriptor = os.dup(copy.fileno())
        self._close()
        self._hold(descriptor)

    def parts(self) -> Iterator[bytes]:
        """Yield the content, part by part."""
        position = 0
        while part := self.read(_PART, position):
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
class SetKind:
    """What is said of sets of one kind.

    Attributes:
        index: the file that says which others there are.
        main: the file that users know such a folder by; the index, if it is empty.
        changed: what is said of a file that is not as the index has it.
        missing: what to do about a folder without such a set.
        again: what to do about a set that is damaged.
    """

    index: str
    changed: str
    missing: str
    again: str
    main: str = ""


class OpenedFiles:
    """The files of one set, open. Whatever takes their place in the folder, these stay the ones
    that are read.

    Attributes:
        folder: where they were found.
        kind: which of them is the index.
        identity: the sha256 of the index, which names all of them by their own.
    """

    def __init__(
        self, folder: Path, kind: SetKind, files: Mapping[str, OpenFile], identity: str
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
        """Return whether the folder still holds this set.

        Raises:
            ResultError: what it holds cannot be told.
        """
        index = _places(self.folder, self.kind).index
        return index is not None and index.digest() == self.identity


def open_files(
    folder: Path,
    kind: SetKind,
    digests: Callable[[OpenFile], Mapping[str, str]],
    optional: Collection[str] = (),
) -> OpenedFiles:
    """Open the index, the files that it names and the optional ones, then compare all that it
    names with it.

    A writer that replaces the set meanwhile is noticed, and the new set is opened. A set that
    was complete when its writer was stopped is read where it lies.

    Args:
        folder: where the files are; it may be a link itself, no file in it may.
        kind: which file is the index, and what to say of damage.
        digests: reads from the index the sha256 of each file to open.
        optional: files that are opened where they are there; nothing vouches for their content.

    Raises:
        ResultError: the set is missing or damaged, holds a link, or is replaced again and
            again.
    """
    previous: object = None
    for _ in range(ATTEMPTS):
        places = _places(folder, kind)
        index = places.index
        files: dict[str, OpenFile] = {}
        fault: ResultError | None
        if index is None:
            fault = _missing(folder, places, kind)
        else:
            listed = _checked_names(digests(index), index.path, kind)
            for name in (*listed, *optional):
                file = places.open(name)
                if file is not None:
                    files[name] = file
            fault = _fault(folder, kind, listed, files)
        # The first places stay open until then, so that no new file has the inode of one.
        is_same = places.state == _places(folder, kind).state
        if is_same and index is not None and fault is None:
            files[kind.index] = index
            return OpenedFiles(folder, kind, files, index.digest())
        seen = (places.state, {name: file.identity for name, file in files.items()})
        if fault is not None and seen == previous:
            raise fault
        previous = seen
    raise ResultError(
        f"{folder} is written again and again by other runs", help="wait for them"
    )


def _missing(folder: Path, places: "_Places", kind: SetKind) -> ResultError:
    """Return what to say of a folder without an index."""
    main = kind.main or kind.index
    if places.open(main) is None:
        return ResultError(f"{folder / main} does not exist", help=kind.missing)
    return ResultError(f"{folder / kind.index} does not exist", help=kind.again)


def _checked_names(listed: Mapping[str, str], path: Path, kind: SetKind) -> Mapping[str, str]:
    """Refuse an index that names what is not in its folder."""
    for name in listed:
        if not _is_plain(name) or "/" in name:
            raise ResultError(f"{path} is damaged: it names {name!r:.80}", help=kind.again)
    return listed


def _fault(
    folder: Path,
    kind: SetKind,
    listed: Mapping[str, str],
    files: Mapping[str, OpenFile],
) -> ResultError | None:
    """Return what is wrong with the first file that is not as the index has it."""
    for name, digest in listed.items():
        file = files.get(name)
        if file is None:
            return ResultError(f"{folder / name} is missing", help=kind.again)
        if file.digest() != digest:
            return ResultError(f"{folder / name} {kind.changed}", help=kind.again)
    return None


class _Places:
    """Says for a folder as it is at one moment which of its files lie aside, to replace others.

    Attributes:
        index: the file that lists the others, or None.
        state: changes whenever another set begins to count.
    """

    def __init__(self, folder: Path, kind: SetKind) -> None:
        self._folder = folder
        self._incoming: Collection[str] = ()
        self._outgoing: Collection[str] = ()
        self._moves = _opened(folder / ASIDE / MOVES)
        if self._moves is not None:
            self._incoming, self._outgoing = planned_moves(self._moves.content(), folder)
        self.index = self.open(kind.index)
        files = (self._moves, self.index)
        self.state = [file.identity if file else None for file in files]

    def open(self, name: str) -> OpenFile | None:
        """Open the file that counts under this name; None where there is none.

        Raises:
            ResultError: it is a link, or no file, or may not be read.
        """
        if name in self._incoming:
            file = _opened(self._folder / ASIDE / name)
            if file is not None:
                return file
        if name in self._outgoing:
            return None
        return _opened(self._folder / name)


def _places(folder: Path, kind: SetKind) -> _Places:
    """Return what lies in a folder, and the replacement in it if that is complete.

    Raises:
        ResultError: there is no such folder, it may not be read, or the replacement is none.
    """
    try:
        os.scandir(folder).close()
        require_aside(folder)
    except (FileNotFoundError, NotADirectoryError):
        path = folder / (kind.main or kind.index)
        raise ResultError(f"{path} does not exist", help=kind.missing) from None
    except OSError as error:
        raise ResultError(f"cannot read {folder}: {error.strerror or error}") from error
    return _Places(folder, kind)


def require_aside(folder: Path) -> None:
    """Refuse something else in place of the folder for new files.

    Raises:
        ResultError: it is a link or a file.
    """
    aside = folder / ASIDE
    if aside.is_symlink() or (aside.exists() and not aside.is_dir()):
        raise ResultError(f"{aside} is not a folder of quantizer", help="remove it")


def _opened(path: Path) -> OpenFile | None:
    """Open a file of a set; None where there is none."""
    try:
        if path.is_symlink():
            help_ = "put the file itself in its place"
            raise ResultError(f"{path} is a link, which is not followed", help=help_)
        # No link that has come meanwhile is followed.
        file = OpenFile(path, os.open(path, _READING | open_flags("O_NOFOLLOW")))
        if not stat.S_ISREG(file.mode):
            raise ResultError(f"{path} is not a file", help="remove it")
        if not REPLACES_OPEN_FILES:
            file.release()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}") from error
    return file


def planned_moves(content: bytes, folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the files that a replacement brings, and of those that go.

    Raises:
        ResultError: the content is nothing that a writer of sets left.
    """
    try:
        moves = json.loads(content)
        incoming = moves["files"]
        outgoing = moves["gone"]
        is_sound = all(_is_plain(name) for name in (*incoming, *outgoing))
    except (ValueError, LookupError, TypeError, RecursionError):
        is_sound = False
    if not is_sound or not isinstance(incoming, list) or not isinstance(outgoing, list):
        help_ = f"remove {folder / ASIDE}"
        raise ResultError(f"{folder / ASIDE / MOVES} is damaged", help=help_)
    return incoming, outgoing


def _is_plain(name: Any) -> bool:
    """Return whether this is the name of a file in the folder or in a folder inside it."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    parts = name.split("/")
    if len(parts) > 2:
        return False
    return all(part and part[0] != "." for part in parts)


def json_digest(value: Any) -> str:
    """Return the sha256 of a JSON value, whatever its layout in a file."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
