"""Small words of messages: how a value is quoted, what is closest to a misspelt word. No rules, no places."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

MAX_QUOTED = 60


def quoted(value: Any) -> str:
    """A value as JSON, cut so that it never floods a message.

    >>> quoted("half_up"), quoted(True)
    ('"half_up"', 'true')
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def listed(words: Iterable[Any]) -> str:
    """Words in a row.

    >>> listed(["max", "mean"])
    'max, mean'
    """
    return ", ".join(word if isinstance(word, str) else json.dumps(word) for word in words)


def a_kind(value: object) -> str:
    """A value's type with its article.

    >>> a_kind(3), a_kind([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names in a row, and how many there are besides.

    >>> shortened(["q", "k", "v"], most=2)
    'q, k and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to a misspelt one, whatever its case; None if none is near.

    >>> closest("bit_widht", ["method", "bit_width"])
    'bit_width'
    """
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower()[:100], by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None
