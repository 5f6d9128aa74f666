"""A JSON document that knows where each of its keys and values is, and which are valid."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.json_types import JsonMapping, JsonPath

TextSpan = tuple[int, int]


@dataclass(frozen=True)
class Text:
    """A file's text under the name shown to the user.

    `encoding` is "utf-8", or "utf-8-sig" after a byte order mark.
    """

    name: str
    text: str
    encoding: str = "utf-8"

    @cached_property
    def _line_starts(self) -> list[int]:
        line_ends = [index for index, letter in enumerate(self.text) if letter == "\n"]
        return [0, *(end + 1 for end in line_ends)]

    def place(self, span: TextSpan, pointer: str = "") -> Place:
        """Return the place of the characters `span[0]` to `span[1]`, cut at the line's end."""
        start, end = span
        line = bisect_right(self._line_starts, start)
        line_start = self._line_starts[line - 1]
        line_end = len(self.text)
        if line < len(self._line_starts):
            line_end = self._line_starts[line] - 1
        column = start - line_start + 1
        length = max(min(end, line_end) - start, 1)
        return Place(self.name, line, column, length, pointer)


@dataclass(frozen=True)
class Document:
    """A parsed file. `values` and `keys` map a JSON pointer (RFC 6901) to the span of its value
    and of its key.

    `dotted` names the places of a document without text. `ignored` are the JSON pointers of
    values that are wrong: `get` leaves them out, so that the others can be checked.
    `problems` are the faults of syntax that the parser has read over.
    """

    source: Text
    value: Any
    values: Mapping[str, TextSpan]
    keys: Mapping[str, TextSpan]
    dotted: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    problems: tuple[Diagnostic, ...] = ()

    @classmethod
    def of(cls, value: JsonMapping, name: str) -> Document:
        """Return a document of a Python value, whose places print as `name.key.key`.

        >>> document = Document.of({"layer_quant_config": {"fc.0": 1}}, "Config")
        >>> str(document.place("layer_quant_config", "fc.0"))
        'Config.layer_quant_config["fc.0"]'
        """
        paths = {pointer_to(*path): path for path in _paths(value)}
        dotted = {
            pointer: name + "".join(map(_dotted_part, path)) for pointer, path in paths.items()
        }
        nowhere: dict[str, TextSpan] = dict.fromkeys(dotted, (0, 0))
        return cls(Text(name, ""), value, nowhere, nowhere, dotted)

    def place(self, *path: str | int, key: bool = False) -> Place | None:
        """Return where the value (or the key) at a path is, if there is one.

        An array's item has no key, so its value is taken.
        """
        pointer = pointer_to(*path)
        if pointer in self.dotted:
            return Place(self.dotted[pointer], 0, 0, pointer=pointer)
        span = self.values.get(pointer)
        if key:
            span = self.keys.get(pointer, span)
        return self.source.place(span, pointer) if span else None

    @cached_property
    def paths_at(self) -> Mapping[str, JsonPath]:
        """Return the path of each value, by what its place prints as."""
        return {str(self.place(*path)): path for path in _paths(self.value)}

    def at(self, *path: str | int) -> Any:
        """Return the value at a path."""
        return value_at(self.value, path)

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`; None if it is not there, null, or ignored."""
        value: Any = self.value
        for depth, part in enumerate(path, 1):
            is_there = isinstance(value, list)
            if isinstance(part, str):
                is_there = isinstance(value, dict) and part in value
            if not is_there:
                return None
            if self.ignored and pointer_to(*path[:depth]) in self.ignored:
                return None
            value = value[part]
        return value

    def items(self, *path: str | int) -> list[JsonPath]:
        """Return the paths of the valid items of the list at `path`; none without a list."""
        items = self.get(*path)
        indices = range(len(items)) if isinstance(items, list) else ()
        paths = [(*path, index) for index in indices]
        return [item for item in paths if self.get(*item) is not None]

    def entries(self, *blocks: str) -> list[JsonPath]:
        """Return the paths of the entries of the blocks; one entry may stand without a list."""
        paths: list[JsonPath] = []
        for block in blocks:
            if isinstance(self.get(block), dict):
                paths.append((block,))
            else:
                paths += self.items(block)
        return paths

    def names(self, *blocks: str) -> list[tuple[str, Place | None]]:
        """Return the name of every entry of the blocks, in order, and its place."""
        paths = [(*path, "name") for path in self.entries(*blocks)]
        names = [(self.get(*path), self.place(*path)) for path in paths]
        return [(name, place) for name, place in names if isinstance(name, str)]


def pointer_to(*path: str | int) -> str:
    """Return the JSON pointer of a path.

    >>> pointer_to("layer_quantize_config", 0, "a/b")
    '/layer_quantize_config/0/a~1b'
    """
    pointer = ""
    for part in path:
        escaped = str(part).replace("~", "~0").replace("/", "~1")
        pointer += f"/{escaped}"
    return pointer


def path_from(pointer: str) -> list[str]:
    """Return the parts of a JSON pointer.

    >>> path_from("/layer_quantize_config/0/a~1b")
    ['layer_quantize_config', '0', 'a/b']
    """
    _, *parts = pointer.split("/")
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def value_at(value: Any, path: Iterable[str | int]) -> Any:
    """Return the member of a JSON value at a path that is there.

    >>> value_at({"exclude": ["stem", "fc"]}, ("exclude", 1))
    'fc'
    """
    for part in path:
        value = value[part]
    return value


def _paths(value: Any, path: JsonPath = ()) -> Iterator[JsonPath]:
    yield path
    members: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    for key, item in members:
        yield from _paths(item, (*path, key))


def _dotted_part(part: str | int) -> str:
    """Return a key or an index as Python writes it after a name."""
    is_attribute = isinstance(part, str) and part.isidentifier()
    return f".{part}" if is_attribute else f"[{json.dumps(part)}]"
