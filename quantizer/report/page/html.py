"""Write elements of HTML and SVG. Texts and attributes are escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources

_WITHOUT_END = frozenset({"br", "meta", "input"})
"""Elements of HTML that have no end; those of SVG have one."""


class Markup(str):
    """A string of HTML or SVG, which is not escaped.

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
    """Return an element.

    In names of attributes a last underscore is dropped, and the others become dashes. None and
    False leave an attribute out, True writes its name alone.

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
    if name in _WITHOUT_END and not children:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{fragment(*children)}</{name}>")


def fragment(*children: Child | Iterable[Child]) -> Markup:
    """Return elements and texts one after the other.

    >>> fragment("a & b", element("br"), [1, None])
    'a &amp; b<br>1'
    """
    return Markup("".join(map(_child_text, children)))


def _child_text(child: Child | Iterable[Child]) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child, quote=False)
    if isinstance(child, (int, float)):
        return str(child)
    return fragment(*child)


def page_file(name: str) -> str:
    """Return the text of a file in this folder."""
    file = resources.files("quantizer.report.page").joinpath(name)
    return file.read_text(encoding="utf-8")
