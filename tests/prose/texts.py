"""Collects the sentences that readers see: pages, printed messages, schemas and the report."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n+)+")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_HIDDEN = (
    # The address of a link, a comment or a tag of HTML, an address that is shown
    re.compile(r"(?<=\])\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"</?[a-zA-Z][^<>\n]*>"),
    re.compile(r"https?://\S+"),
)
_LINK = re.compile(r"(?<!`)\[([^][]+)\]\([^)\s]+\)")
_MARKS = re.compile(r"[\[\]]|\*(?=\S)|(?<=\S)\*")
"""Brackets of links and stars of emphasis. The star of an item of a list stays."""
_EXAMPLE = re.compile(r"\n *>>>.*?(?=\n\s*\n|$)", re.DOTALL)
_SOURCE = re.compile(r"\n *(?:Source|Sources): .*?(?=\n\s*\n|$)", re.DOTALL)
_FIELD = re.compile(r"^( +)`?[A-Za-z_][\w`, *]*: ", re.MULTILINE)
"""The parts of docstrings that are not prose: examples, sources, and the names of arguments."""
_TEMPLATE_VALUE = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_TEMPLATE_TAG = re.compile(r"\{[%#].*?[%#]\}|</?[a-zA-Z][^<>]*>", re.DOTALL)
_PLACEHOLDERS = itertools.cycle("xyz")
"""Letters of the words that replace code; two neighbours differ."""
_PROSE = re.compile(r"\w [a-z]|[a-z] \w")
"""Two words in a row: other strings are names, keys and formats."""
_FUNCTION_WORD = re.compile(
    r"\b(an?|and|are|as|by|for|from|has|have|in|is|it|no|not|of|on|or|that|the|to|with)\b"
)
"""Sentences have some of these; lists of names have none."""


@dataclass(frozen=True)
class Text:
    """Prose of one file, in which code has been replaced.

    Attributes:
        file: its path in the repository.
        content: sentences, separated by empty lines where the file separates them.
        lines: the line of the file for each line of the content.
        links: the line and the text of each link.
    """

    file: str
    content: str
    lines: tuple[int, ...]
    links: tuple[tuple[int, str], ...] = ()


def texts() -> Iterator[Text]:
    """Yield the prose of each page, module, document and template."""
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        yield markdown(_name(page), page.read_text("utf-8"))
    for module in sorted((ROOT / "quantizer").rglob("*.py")):
        yield strings(_name(module), module.read_text("utf-8"))
    for document in _documents():
        yield descriptions(_name(document), document.read_text("utf-8"))
    for book in sorted((ROOT / "examples").glob("*.ipynb")):
        yield notebook(_name(book), book.read_text("utf-8"))
    for template in sorted((ROOT / "quantizer").rglob("*.html")):
        yield html(_name(template), template.read_text("utf-8"))


def _documents() -> Iterator[Path]:
    """Yield the JSON files with sentences: schemas and presets."""
    yield from sorted((ROOT / "schemas").glob("*.schema.json"))
    yield ROOT / "schemas" / "codes.json"
    yield from sorted((ROOT / "configs").glob("*.json"))


def markdown(file: str, source: str) -> Text:
    """Return a page whose code is one word each, and whose addresses are left out."""
    content = _FENCE.sub(_as_blank, source)
    content = _INDENTED.sub(_as_blank, content)
    links = []
    for link in _LINK.finditer(content):
        line = content.count("\n", 0, link.start()) + 1
        links.append((line, " ".join(link[1].split())))
    content = _CODE.sub(_as_word, content)
    for pattern in _HIDDEN:
        content = pattern.sub(_as_blank, content)
    content = _MARKS.sub(" ", content)
    return Text(file, content, tuple(range(1, content.count("\n") + 2)), tuple(links))


def html(file: str, source: str) -> Text:
    """Return a template of HTML. Its elements and statements separate sentences."""
    content = _TEMPLATE_VALUE.sub(_as_word, source)
    content = _TEMPLATE_TAG.sub(_as_boundary, content)
    return Text(file, content, tuple(range(1, content.count("\n") + 2)))


def strings(file: str, source: str) -> Text:
    """Return the string constants of a module that are prose, and its docstrings.

    The values that an f-string inserts are one word each.
    """
    tree = ast.parse(source)
    docstrings = _docstrings(tree)
    inner: set[int] = set()
    blocks: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(id(value) for value in node.values)
            blocks.append((node.lineno, "".join(map(_piece, node.values))))
        if not isinstance(node, ast.Constant) or id(node) in inner:
            continue
        if isinstance(node.value, str):
            is_docstring = id(node) in docstrings
            text = _without_code(node.value) if is_docstring else node.value
            blocks.append((node.lineno, text))
    return _joined(file, blocks)


def descriptions(file: str, source: str) -> Text:
    """Return the sentences of a JSON file."""
    blocks: list[tuple[int, str]] = []
    begin = 0
    for value in _leaves(json.loads(source)):
        written = json.dumps(value, ensure_ascii=False)
        begin = max(source.find(written), 0)
        blocks.append((source.count("\n", 0, begin) + 1, value))
    return _joined(file, blocks)


def notebook(file: str, source: str) -> Text:
    """Return the cells of a notebook that are Markdown."""
    blocks: list[tuple[int, str]] = []
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown" and cell["source"]:
            begin = source.find(json.dumps(cell["source"][0], ensure_ascii=False))
            blocks.append((source.count("\n", 0, begin) + 1, "".join(cell["source"])))
    return _joined(file, blocks)


def _joined(file: str, blocks: list[tuple[int, str]]) -> Text:
    """Return the blocks that are prose, one paragraph each."""
    contents: list[str] = []
    lines: list[int] = []
    links: list[tuple[int, str]] = []
    for line, block in sorted(blocks):
        if not (_PROSE.search(block) and _FUNCTION_WORD.search(block)):
            continue
        text = markdown(file, block)
        content = text.content.strip("\n")
        contents.append(content)
        lines.extend([line] * (content.count("\n") + 2))
        for _, link in text.links:
            links.append((line, link))
    return Text(file, "\n\n".join(contents), tuple(lines) or (1,), tuple(links))


def _docstrings(tree: ast.AST) -> set[int]:
    """Return which constants are docstrings, except those of commands."""
    docstrings: set[int] = set()
    helps: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        if isinstance(node, ast.FunctionDef) and _is_command(node):
            helps.update(id(inner) for inner in ast.walk(node.body[0]))
    return docstrings - helps


def _without_code(docstring: str) -> str:
    """Return a docstring without examples, sources and names of fields."""
    for pattern in (_EXAMPLE, _SOURCE):
        docstring = pattern.sub("\n", docstring)
    return _FIELD.sub(r"\1", docstring)


def _is_command(function: ast.FunctionDef) -> bool:
    """Return whether a decorator makes a command of a function."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator).startswith(("command(", "click.command(", "click.group(")):
            return True
    return False


def _piece(value: ast.expr) -> str:
    """Return a part of an f-string."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    return next(_PLACEHOLDERS)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)


def _as_blank(match: re.Match[str]) -> str:
    """Return spaces of the same length, with the line ends."""
    return re.sub(r"[^\n]", " ", match[0])


def _as_boundary(match: re.Match[str]) -> str:
    """Return what separates the cells of a table, with the line ends."""
    return re.sub(r"[^\n]", "|", match[0])


def _as_word(match: re.Match[str]) -> str:
    """Return one word of the same length, with the line ends."""
    return re.sub(r"[^\n]", next(_PLACEHOLDERS), match[0])


def _name(path: Path) -> str:
    """Return a path as messages have it."""
    return path.relative_to(ROOT).as_posix()
