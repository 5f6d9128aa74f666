"""Write elements of HTML and SVG. Texts and attributes are escaped here, and nowhere else."""

from collections.abc import Iterable
from html import escape


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
