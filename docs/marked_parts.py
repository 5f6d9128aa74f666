"""Parts of pages between two marks, which docs/generate.py writes."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = r"(<!-- {name}: written by docs/generate\.py[^\n]*-->\n).*?(<!-- end of {name} -->\n)"


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with another text between the marks of a part.

    Raises:
        ValueError: if the page has no such marks, or has them twice.
    """
    parts = re.split(_PART.format(name=name), page, flags=re.DOTALL)
    if len(parts) != 4:
        raise ValueError(f"a page has the part {name} {len(parts) // 3} times, not once")
    before, begin, end, after = parts
    return "".join([before, begin, text, end, after])


def without_parts(page: str, names: Iterable[str]) -> str:
    """Return what is written by hand: a page without the text of its parts."""
    for name in names:
        page = re.sub(_PART.format(name=name), "", page, flags=re.DOTALL)
    return page
