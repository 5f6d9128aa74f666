"""Reads a file into a `Document`. Every fault of syntax or encoding is a diagnostic; only
`ConfigError` escapes.
"""

import os
from pathlib import Path

from quantizer.config.diagnostics import ConfigError, Diagnostic, Place, in_order
from quantizer.config.document.document import Document, Text
from quantizer.config.document.parse import Parser
from quantizer.config.wording import closest
from quantizer.storage.plain_files import read_start

MAX_BYTES = 1_000_000


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read the JSON object in the file `path`: `read_text`, then `parse_document`."""
    return parse_document(read_text(path))


def read_text(path: str | os.PathLike[str]) -> Text:
    """The text of the file `path`, in UTF-8 (a byte order mark is accepted), at most 1 MB; or a
    `ConfigError`.
    """
    return _decode(os.fspath(path), _read_bytes(path))


def parse_document(source: Text) -> Document:
    """Parse a JSON object that is nested at most 64 deep.

    It has no duplicate keys, no comments, no trailing commas and no NaN or Infinity.
    `ConfigError` lists all that is wrong.
    """
    parser = Parser(source)
    value = parser.parse()
    if not parser.problems and not isinstance(value, dict):
        parser.report(
            "QZ009",
            "the file contains "
            f"{'an array' if isinstance(value, list) else 'a single value'}, not an object",
            (parser.start, parser.start + 1),
            "a config begins with { and ends with }",
        )
    if parser.problems:
        raise ConfigError(in_order(parser.problems), {source.name: source.text})
    return Document(source, value, parser.values, parser.keys)


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    name = os.fspath(path)
    try:
        data = read_start(path, MAX_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(
            name, "there is no such file", _help_for_missing(Path(path))
        ) from None
    except IsADirectoryError:
        raise _unreadable(name, "this is a directory", "give the path of a JSON file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(name, f"the file cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        help_ = "no config is this large: is it the right file?"
        raise _unreadable(name, "the file is larger than 1 MB", help_, code="QZ003")
    return data


def _decode(name: str, data: bytes) -> Text:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        message = "the file is not UTF-8 at byte 0: it looks like UTF-16"
        raise _unreadable(name, message, "save it as UTF-8", code="QZ002")
    if b"\0" in data:
        at = data.index(b"\0")
        raise _undecodable(
            name, data, at, f"the file is not UTF-8 text at byte {at}: there is a NUL byte"
        )
    encoding = "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        at = error.start + (3 if encoding == "utf-8-sig" else 0)
        raise _undecodable(name, data, at, f"the file is not UTF-8 at byte {at}") from None
    return Text(name, text, encoding)


def _undecodable(name: str, data: bytes, at: int, message: str) -> ConfigError:
    """The finding at the line and column of byte `at`; in the excerpt a mark stands for what is
    not UTF-8.
    """
    shown = Text(name, data.decode("utf-8-sig", errors="replace"))
    start = len(data[:at].decode("utf-8-sig", errors="replace"))
    found = Diagnostic(
        "QZ002", message, shown.place((start, start + 1)), help="save it as UTF-8"
    )
    return ConfigError([found], {name: shown.text})


def _unreadable(
    name: str, message: str, help_: str | None = None, *, code: str = "QZ001"
) -> ConfigError:
    return ConfigError([Diagnostic(code, message, Place(name, 1, 1), help=help_)])


def _help_for_missing(path: Path) -> str:
    try:
        neighbours = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".json"]
    except (OSError, ValueError):
        neighbours = []
    found = closest(path.name, neighbours)
    return (
        f'did you mean "{path.parent / found}"?'
        if found
        else "`quantizer init` writes a config to start from"
    )
