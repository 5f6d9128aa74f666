"""The list of the files that quantizer has written to a folder. A folder with a list is one of
quantizer's. Imports no torch.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantizer.errors import ResultError

LIST_FILE = ".quantizer.json"
"""The file of the list."""
NEW_FILES = "new"
"""The subfolder of the work folder with the files of a set that is being written."""
LOCK = "lock"
"""The name of the lock file in the work folder."""
_FORMAT = 1
_TOKEN = re.compile("[0-9a-f]{32}")
_DIGEST = re.compile("[0-9a-f]{64}")
_MOST_PARTS = 4
"""The most parts of the name of a file: its folders and itself."""


@dataclass(frozen=True)
class Moves:
    """A replacement of files that has been decided. Once the list has it, the folder has the
    new files, in either place.

    Attributes:
        files: the names of the new files in the work folder; the main one comes first.
        gone: the names of files that are removed.
    """

    files: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class FolderList:
    """The content of a list.

    Attributes:
        token: 32 random hexadecimal digits. Temporary names contain it, so that no other
            program has files of these names.
        files: the sha256 of each file, by its name in the folder. While a file is replaced,
            it has two.
        moves: of a replacement that was not completed.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(16))
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    moves: Moves | None = None

    @property
    def work_folder(self) -> str:
        """Return the name of the subfolder for files that are not complete."""
        return f".quantizer-{self.token}"

    def content(self) -> bytes:
        """Return the content of the file."""
        value: dict[str, Any] = {"format": _FORMAT, "token": self.token, "files": self.files}
        if self.moves is not None:
            value["moves"] = {"files": self.moves.files, "gone": self.moves.gone}
        return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def parse_list(content: bytes, path: Path) -> FolderList:
    """Return a list, after a check of all names in it.

    Args:
        content: of the file.
        path: of the file, for messages.

    Raises:
        ResultError: it is not a list of this version.
    """
    try:
        value = json.loads(content)
        token = value["token"]
        stored = value["files"]
        is_sound = value["format"] == _FORMAT and _TOKEN.fullmatch(token) is not None
        files: dict[str, tuple[str, ...]] = {}
        for name, digests in stored.items():
            files[name] = tuple(digests)
            is_sound &= is_name(name) and all(map(is_digest, digests))
        moves = None
        if "moves" in value:
            moves = Moves(tuple(value["moves"]["files"]), tuple(value["moves"]["gone"]))
            is_sound &= all(map(is_name, (*moves.files, *moves.gone)))
            is_sound &= bool(moves.files) and files.keys() >= {*moves.files, *moves.gone}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ResultError(
            f"{path} is damaged: it is not a list of quantizer's files",
            help="give an empty folder, or one that does not exist",
        )
    return FolderList(token, files, moves)


def is_name(name: Any) -> bool:
    """Return whether this is the name of a file in a folder, or in a subfolder of it."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    parts = name.split("/")
    if len(parts) > _MOST_PARTS:
        return False
    return all(part and part[0] != "." for part in parts)


def is_digest(value: Any) -> bool:
    """Return whether this is a sha256 in hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
