"""Format parts of messages, and find the known word that a misspelt one is closest to."""

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

_MAX_QUOTED = 60
"""The most characters of a value in a message."""
_LETTERS_FOR_SLIPS = (4, 8)
"""The fewest letters of words that may have a slip of typing, and two slips."""


def quoted(value: Any) -> str:
    """Return a value as JSON, cut so that it never floods a message.

    >>> quoted("half_up"), quoted(True)
    ('"half_up"', 'true')
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 1] + "…"


def listed(words: Iterable[Any]) -> str:
    """Return words with commas between them.

    >>> listed(["max", "mean"])
    'max, mean'
    """
    return ", ".join(word if isinstance(word, str) else json.dumps(word) for word in words)


def joined(words: Iterable[str], last: str) -> str:
    """Return words with commas, and another word before the last of them.

    >>> joined(["a", "b", "c"], "or")
    'a, b or c'
    """
    *first, end = words
    return f" {last} ".join(filter(None, (", ".join(first), end)))


def a_kind(value: object) -> str:
    """Return a value's type with its article, or "None".

    >>> a_kind(3), a_kind([]), a_kind(None)
    ('an int', 'a list', 'None')
    """
    if value is None:
        return "None"
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a name with "a" or "an" before it.

    >>> with_article("int"), with_article("Selector")
    ('an int', 'a Selector')
    """
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def first_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names, and how many more there are.

    >>> first_names(["q", "k", "v"], most=2)
    'q, k and 1 more'
    """
    text = ", ".join(names[:most])
    more = len(names) - most
    if more > 0:
        text += f" and {more} more"
    return text


def named_output(name: str) -> str:
    """Return what a sentence calls an output: one without a name is known by its place.

    >>> named_output("boxes"), named_output("2"), named_output("0[:, 4]")
    ('boxes', 'output 2', 'output 0[:, 4]')
    """
    place = name.partition("[")[0]
    if place.replace(".", "").isdigit():
        return f"output {name}"
    return name


def counted(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "layer"), counted(2, "batch")
    ('1 layer', '2 batches')
    """
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count} {noun}{ending}"


def closest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to a misspelt one, in any case; None if none is near.

    >>> closest_word("bit_widht", ["method", "bit_width"])
    'bit_width'
    """
    by_lower = {name.lower(): name for name in known}
    start = word.lower()[:100]
    matches = difflib.get_close_matches(start, by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question with the known word nearest to a misspelt one; `otherwise` if none is
    near.

    >>> did_you_mean("fold", ["folder"], "known are folders")
    'did you mean folder?'
    """
    near = closest_word(word, known)
    return otherwise if near is None else f"did you mean {near}?"


def misspelt(word: str, known: Iterable[str]) -> str | None:
    """Return the one known word that differs from `word` in case and punctuation, or in a slip
    of typing; None if none does.

    A slip is a letter added, left out, replaced or swapped with its neighbour; a long word may
    have two. Another digit is another word, and so is an unsigned format.

    >>> misspelt("bit_widht", ["bit_width"]), misspelt("cpu", ["CPU", "GPU"])
    ('bit_width', 'CPU')
    >>> misspelt("int7", ["int8"]), misspelt("uint2", ["int2"])
    (None, None)
    """
    letters = _letters(word[:100])
    names = [name for name in known if _format_marks(name) == _format_marks(word)]
    slips = {name: _count_slips(letters, _letters(name)) for name in names}
    least = min(slips.values(), default=0)
    nearest = [name for name, count in slips.items() if count == least]
    max_slips = sum(len(letters) >= fewest for fewest in _LETTERS_FOR_SLIPS)
    return nearest[0] if len(nearest) == 1 and least <= max_slips else None


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word)).lower()


def _format_marks(word: str) -> tuple[str, bool]:
    """Return the digits of a word, and whether it begins with u. In these the names of number
    formats differ, such as int4, int8 and uint8, and none is a slip of another.
    """
    return "".join(filter(str.isdigit, word)), word[:1] in "uU"


def _count_slips(word: str, known: str) -> int:
    """Return the letters to add, leave out, replace or swap with a neighbour: the optimal
    string alignment distance.
    """
    # rows[i][j]: the slips between the first i letters of `word` and the first j of `known`
    rows = [list(range(len(known) + 1))]
    for i, letter in enumerate(word):
        row = [i + 1]
        for j, other in enumerate(known):
            added = row[j] + 1
            left_out = rows[i][j + 1] + 1
            replaced = rows[i][j] + (letter != other)
            slips = min(added, left_out, replaced)
            if i and j and (letter, word[i - 1]) == (known[j - 1], other):
                slips = min(slips, rows[i - 1][j - 1] + 1)
            row.append(slips)
        rows.append(row)
    return rows[-1][-1]
