"""Elements of HTML and SVG. Texts and attributes are escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

EMPTY = frozenset({"br", "meta", "input"})
"""Elements of HTML that have no end; those of SVG have one."""


class Markup(str):
    """What is markup already; any other string is text.

    >>> Markup("<b>") + "x"
    '<b>x'
    """

    __slots__ = ()

    def __html__(self) -> str:
        """Return the markup, for templates, which escape any other text."""
        return self


Child = Markup | str | float | None
"""A number is written as `str` has it, None is left out."""


def element(
    name: str, /, *children: Child | Iterable[Child], **attributes: str | float | bool | None
) -> Markup:
    """An element; of attributes' names a last underscore is dropped, others become dashes.

    None and False leave an attribute out, True writes its name alone.

    >>> element("td", "a<b", class_="name", data_rank=1, hidden=True, title=None)
    '<td class="name" data-rank="1" hidden>a&lt;b</td>'
    """
    words = [name]
    for key, value in attributes.items():
        written = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(written)
        elif value is not None and value is not False:
            words.append(f'{written}="{escape(str(value))}"')
    start = " ".join(words)
    return Markup(
        f"<{start}>"
        if name in EMPTY and not children
        else f"<{start}>{fragment(*children)}</{name}>"
    )


def fragment(*children: Child | Iterable[Child]) -> Markup:
    """Elements and texts one after the other.

    >>> fragment("a & b", element("br"), [1, None])
    'a &amp; b<br>1'
    """
    return Markup("".join(_written(child) for child in children))


def _written(child: Child | Iterable[Child]) -> str:
    if child is None or isinstance(child, Markup):
        return child or ""
    if isinstance(child, str):
        return escape(child, quote=False)
    return str(child) if isinstance(child, (int, float)) else fragment(*child)
