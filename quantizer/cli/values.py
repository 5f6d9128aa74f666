"""Parses values of options for which click has no type."""

import math

import click

from quantizer.storage.process_memory import parse_size


def rows_shown(text: str) -> int | str:
    """Return the value of `--top`: a whole number, or "all".

    Raises:
        BadParameter: it is neither.
    """
    if text == "all":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise click.BadParameter(f"{text!r} is neither a number of rows nor 'all'.")
    return int(text)


def memory_size(text: str) -> int:
    """Return the value of `--memory` and `--max_unpacked` in bytes.

    Raises:
        BadParameter: it is not a size.
    """
    try:
        return parse_size(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a size of memory; write 8GB or 512MB, for example."
        ) from None


def minutes(text: str) -> float:
    """Return the value of `--minutes`.

    Raises:
        BadParameter: it is not a number, or below 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"{text!r} is not a number of minutes; write 10 or 0.5.")
    return value
