"""Lines that commands print, compared with those of the documentation: words are equal, and
numbers nearly so, as the order of sums, and what algorithms make of it, differ from processor
to processor.
"""

from __future__ import annotations

import pytest


def is_printed(line: str, found: str) -> bool:
    """Whether `found` is the line that the documentation has, in columns of any width.

    >>> (
    ...     is_printed("sqnr_db 32.16", "sqnr_db   32.14"),
    ...     is_printed("sqnr_db 32.16", "top1 32.16"),
    ... )
    (True, False)
    """
    return _words(line) == _words(found) and _numbers(found) == pytest.approx(
        _numbers(line), rel=0.1, abs=0.1
    )


def _numbers(line: str) -> list[float]:
    return [float(word.removesuffix("%")) for word in line.split() if _is_number(word)]


def _words(line: str) -> list[str]:
    return ["number" if _is_number(word) else word for word in line.split()]


def _is_number(word: str) -> bool:
    try:
        float(word.removesuffix("%"))
    except ValueError:
        return False
    return True
