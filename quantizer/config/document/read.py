"""Read a file into a `Document`. Every fault of syntax or encoding is a finding in a
`ConfigError`.
"""

import os
from pathlib import Path

from quantizer.config.diagnostics import ConfigError, Diagnostic, Place, merged_by_cause
from quantizer.config.document.document import Document, Text
from quantizer.config.document.parse import Parser
from quantizer.config.resources import presets
from quantizer.config.wording import closest_word
from quantizer.plugins import if_command
from quantizer.storage.system_calls import read_start

MAX_CONFIG_BYTES = 1_000_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read the JSON object in the file `path`.

    Raises:
        ConfigError: all that is wrong with the encoding or the syntax.
    """
    return parse_document(read_text(path))


def read_text(path: str | os.PathLike[str]) -> Text:
    """Read the file `path`, at most 1 MB of UTF-8; a byte order mark is accepted.

    Raises:
        ConfigError: the file cannot be read, is larger, or is not UTF-8.
    """
    return _decode(os.fspath(path), _read_bytes(path))


def parse_document(source: Text) -> Document:
    """Parse a JSON object that is nested at most 64 deep.

    It has no duplicate keys, no comments, no trailing commas and no NaN or Infinity.

    Raises:
        ConfigError: all that is wrong with the syntax.
    """
    parser = Parser(source)
    value = parser.parse()
    if not parser.problems and not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else "a single value"
        parser.report(
            "QZ009",
            f"the file contains {kind}, not an object",
            (parser.start, parser.start + 1),
            "a config begins with { and ends with }",
        )
    if parser.problems and Path(source.name).suffix == ".py":
        message = "this is Python, not a config"
        help_ = f"a model is given as <--model {source.name}>"
        raise _unreadable(source.name, message, help_, code="QZ004")
    if parser.problems:
        raise ConfigError(merged_by_cause(parser.problems), {source.name: source.text})
    return Document(source, value, parser.values, parser.keys)


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    name = os.fspath(path)
    try:
        data = read_start(path, MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        help_ = _help_for_missing(Path(path))
        raise _unreadable(name, "there is no such file", help_) from None
    except IsADirectoryError:
        raise _unreadable(name, "this is a directory", "give the path of a JSON file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(name, f"the file cannot be read: {reason}") from None
    if len(data) > MAX_CONFIG_BYTES:
        help_ = "no config is this large: is it the right file?"
        raise _unreadable(name, "the file is larger than 1 MB", help_, code="QZ003")
    return data


def _decode(name: str, data: bytes) -> Text:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        message = "the file is not UTF-8 at byte 0: it looks like UTF-16"
        raise _unreadable(name, message, "save it as UTF-8", code="QZ002")
    nul = data.find(b"\0")
    if nul >= 0:
        message = f"the file is not UTF-8 text at byte {nul}: there is a NUL byte"
        raise _undecodable(name, data, nul, message)
    has_mark = data.startswith(_BYTE_ORDER_MARK)
    encoding = "utf-8-sig" if has_mark else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        position = error.start
        if has_mark:
            position += len(_BYTE_ORDER_MARK)
        message = f"the file is not UTF-8 at byte {position}"
        raise _undecodable(name, data, position, message) from None
    return Text(name, text, encoding)


def _undecodable(name: str, data: bytes, position: int, message: str) -> ConfigError:
    """Return the finding at the line and column of a byte.

    The excerpt shows a replacement character for what is not UTF-8.
    """
    shown = Text(name, data.decode("utf-8-sig", errors="replace"))
    start = len(data[:position].decode("utf-8-sig", errors="replace"))
    place = shown.place((start, start + 1))
    finding = Diagnostic("QZ002", message, place, help="save it as UTF-8")
    return ConfigError([finding], {name: shown.text})


def _unreadable(
    name: str, message: str, help_: str | None = None, *, code: str = "QZ001"
) -> ConfigError:
    return ConfigError([Diagnostic(code, message, Place(name, 1, 1), help=help_)])


def _help_for_missing(path: Path) -> str:
    """Return the name of a neighbour that may be meant, or how to write a preset."""
    if path.stem in presets():
        words = f"`quantizer init --preset {path.stem} -o {path.stem}.json` writes this preset"
        return if_command("init", words)
    try:
        neighbours = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".json"]
    except (OSError, ValueError):
        neighbours = []
    name = closest_word(path.name, neighbours)
    if name:
        return f'did you mean "{path.parent / name}"?'
    return if_command("init", "`quantizer init` writes a config to start from")
