"""Read text and JSON files of other programs, with errors that say file, line and what is
damaged there. Those of transformers do not name the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantizer.config.wording import a_kind
from quantizer.errors import QuantizerError
from quantizer.sources.files.tensor_files import reading, require_data

_AGAIN = "copy or download the file again"


def read_text(path: Path, error: type[QuantizerError]) -> str:
    """Return the text of a file.

    Raises:
        error: it cannot be read, is empty or is not UTF-8.
    """
    with reading(path, error):
        require_data(path)
        content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        line = content.count(b"\n", 0, cause.start) + 1
        byte = content[cause.start]
        raise error(
            f"{path}:{line} is not UTF-8 text: byte {byte:#04x} at offset {cause.start}",
            help="save it as UTF-8; if it was cut off, copy it again",
        ) from cause


def read_object(path: Path, error: type[QuantizerError]) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        error: it cannot be read, or is something else.
    """
    return parse_object(read_text(path, error), path, error)


def parse_object(
    text: str,
    path: Path,
    error: type[QuantizerError],
    *,
    remedy: str = _AGAIN,
    first_line: int = 1,
) -> dict[str, Any]:
    """Return the object that a part of a file is; the arguments are those of `parse_value`.

    Raises:
        error: the text is not JSON, or is something else.
    """
    value = parse_value(text, path, error, remedy=remedy, first_line=first_line)
    if not isinstance(value, dict):
        raise error(f"{path}:{first_line} is {a_kind(value)}, not an object", help=remedy)
    return value


def parse_value(
    text: str,
    path: Path,
    error: type[QuantizerError],
    *,
    remedy: str = _AGAIN,
    first_line: int = 1,
) -> Any:
    """Return the value of a part of a file.

    Args:
        text: of the value, which begins at `first_line`.
        path: of the file.
        error: the error to raise.
        remedy: what to do about it.
        first_line: counted from 1.

    Raises:
        error: the text is not JSON.
    """
    try:
        value = json.loads(text)
        # A half of a surrogate pair can only come from an escape
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as cause:
        half = ascii(cause.object[cause.start])
        raise error(
            f"{path}:{first_line} has {half}, which is half of a character", help=remedy
        ) from cause
    except json.JSONDecodeError as cause:
        place = f"{path}:{first_line - 1 + cause.lineno}:{cause.colno}"
        reason = cause.msg
        if text.startswith("\ufeff"):
            reason = "it begins with a byte order mark"
            remedy = "save it as UTF-8 without one"
        raise error(f"{place} is not JSON: {reason}", help=remedy) from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}:{first_line} is not JSON: {cause}", help=remedy) from cause
    return value
