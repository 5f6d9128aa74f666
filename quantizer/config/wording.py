"""Small words of messages: how a value is quoted, what is closest to a misspelt word. No rules,
no places.
"""

import difflib
import json
import math
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


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "layer"), counted(2, "batch"), counted(0, "entry", "entries")
    ('1 layer', '2 batches', '0 entries')
    """
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count} {plural or noun + ending}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to a misspelt one, whatever its case; None if none is near.

    >>> closest("bit_widht", ["method", "bit_width"])
    'bit_width'
    """
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower()[:100], by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def misspelt(word: str, known: Iterable[str]) -> str | None:
    """The one known word that differs from `word` in case and punctuation, or in a slip of
    typing; None if none does.

    A slip is a letter added, left out, replaced or swapped with its neighbour; a long word may
    have two. Another digit is another word, and so is an unsigned format.

    >>> (
    ...     misspelt("bit_widht", ["bit_width"]),
    ...     misspelt("cpu", ["CPU", "GPU"]),
    ...     misspelt("int7", ["int8"]),
    ... )
    ('bit_width', 'CPU', None)
    >>> misspelt("uint2", ["int2"]) is None
    True
    """
    letters = _letters(word[:100])
    slips = {
        name: _slips(letters, _letters(name))
        for name in known
        if _format(name) == _format(word)
    }
    least = min(slips.values(), default=math.inf)
    near = [name for name, count in slips.items() if count == least]
    may_have = (len(letters) >= _SHORT) + (len(letters) >= _LONG)
    return near[0] if len(near) == 1 and least <= may_have else None


_SHORT, _LONG = 4, 8
"""Words of so many letters may have one slip, and two."""


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word)).lower()


def _format(word: str) -> tuple[str, bool]:
    """What makes another number format of a word: its digits, and whether it begins with the u
    of unsigned.
    """
    return "".join(filter(str.isdigit, word)), word[:1] in "uU"


def _slips(word: str, known: str) -> int:
    """Letters to add, leave out, replace or swap with a neighbour (the optimal string alignment
    distance).
    """
    rows = [list(range(len(known) + 1))]
    for i, letter in enumerate(word):
        row = [i + 1]
        for j, other in enumerate(known):
            row.append(min(rows[i][j + 1] + 1, row[j] + 1, rows[i][j] + (letter != other)))
            if i and j and (letter, word[i - 1]) == (known[j - 1], other):
                row[-1] = min(row[-1], rows[i - 1][j - 1] + 1)
        rows.append(row)
    return rows[-1][-1]
