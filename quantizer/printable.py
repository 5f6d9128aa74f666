"""Escape texts of users, such as names of files and layers. Printed, they must not control a
terminal or a CI log. In a page they must not be elements of HTML.
"""

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

_COMMAND = re.compile(r"^(\s*):(?=:)")
"""Matches the first colon of a GitHub workflow command, such as `::error::`, at the beginning
of a line.
"""
_OLD_COMMAND = re.compile(r"#(?=#\w*\[)")
"""Matches the first `#` of a CI command anywhere in a line: `##[error]`, `##vso[...]`,
`##teamcity[...]`.
"""


def one_line(text: str) -> str:
    r"""Return the text as one line that can be printed safely.

    Line ends, control characters and those that change the direction of writing become Python
    escapes.

    >>> print(one_line("conv\n::error::all is well\x1b[2J"))
    conv\n::error::all is well\x1b[2J
    >>> print(one_line("::error::all is well"))
    \x3a:error::all is well
    """
    if not text.isprintable():
        text = "".join(map(_escape, text))
    text = _COMMAND.sub(r"\1\\x3a", text)
    return _OLD_COMMAND.sub(r"\\x23", text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, such as a traceback, with `one_line` applied to each."""
    parts = map(one_line, text.split("\n"))
    return "\n".join(parts)


def json_text(value: Any) -> str:
    r"""Return sorted, indented JSON that can be printed safely. It has the same value:
    characters that are not printable become escapes of JSON.

    >>> print(json_text("a\u202eb"))
    "a\u202eb"
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return _OLD_COMMAND.sub(r"\\u0023", printable_json(text))


def printable_json(text: str) -> str:
    """Return JSON with escapes for characters that are not printable. It has the same value."""
    # Line ends inside strings are escaped already, so these are between tokens
    return "\n".join(map(_escape_as_json, text.split("\n")))


def _escape(character: str) -> str:
    """Return a character, or its Python escape if it is not printable."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def _escape_as_json(line: str) -> str:
    """Return a line with JSON escapes for characters that are not printable."""
    if line.isprintable():
        return line
    parts: list[str] = []
    for character in line:
        if not character.isprintable():
            character = json.dumps(character)[1:-1]
        parts.append(character)
    return "".join(parts)


class Markup(str):
    """A string of HTML or SVG, which is not escaped.

    >>> Markup("<b>") + "x"
    '<b>x'
    """

    __slots__ = ()

    def __html__(self) -> str:
        """Return the markup, for templates, which escape any other text."""
        return self


def element(
    name: str, /, *children: str | Iterable[str], **attributes: str | float | None
) -> Markup:
    """Return an element. An attribute that is None is left out.

    In names of attributes a last underscore is dropped, and the others become dashes.

    >>> element("td", "a<b", class_="name", data_rank=1, title=None)
    '<td class="name" data-rank="1">a&lt;b</td>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            attribute = key.rstrip("_").replace("_", "-")
            words.append(f'{attribute}="{escape(str(value))}"')
    start = " ".join(words)
    return Markup(f"<{start}>{fragment(*children)}</{name}>")


def fragment(*children: str | Iterable[str]) -> Markup:
    """Return elements and texts one after the other.

    >>> fragment("a & b", [element("b", "c"), "d"])
    'a &amp; b<b>c</b>d'
    """
    return Markup("".join(map(_child_text, children)))


def _child_text(child: str | Iterable[str]) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child, quote=False)
    return fragment(*child)


def with_code(text: str) -> Markup:
    """Return a text with what is in backticks as code.

    >>> with_code("run `a<b`.")
    'run <code>a&lt;b</code>.'
    """
    parts: list[str] = []
    for index, piece in enumerate(text.split("`")):
        is_code = index % 2 == 1
        if is_code:
            piece = element("code", piece)
        parts.append(piece)
    return fragment(*parts)
