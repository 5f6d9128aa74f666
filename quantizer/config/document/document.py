"""A JSON document that knows where each of its keys and values stands, and which are sound.
Knows no form.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantizer.config.diagnostics import Place

Span = tuple[int, int]


@dataclass(frozen=True)
class Text:
    """A file's text under the name shown to the user; `encoding` is "utf-8", or "utf-8-sig"
    after a byte order mark.
    """

    name: str
    text: str
    encoding: str = "utf-8"

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(at + 1 for at, character in enumerate(self.text) if character == "\n")]

    def place(self, span: Span, pointer: str = "") -> Place:
        """The place of the characters `span[0]` to `span[1]`; of several lines only the first
        counts.
        """
        start, end = span
        line = bisect_right(self._line_starts, start)
        line_end = (
            self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        )
        last = min(end, line_end)
        return Place(
            self.name,
            line,
            start - self._line_starts[line - 1] + 1,
            max(last - start, 1),
            pointer,
        )


@dataclass(frozen=True)
class Document:
    """A parsed file. `values` and `keys` map a JSON pointer (RFC 6901) to the span of its value
    and of its key.

    `dotted` names the places of a document without text.
    """

    source: Text
    value: Any
    values: Mapping[str, Span]
    keys: Mapping[str, Span]
    dotted: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Mapping[str, Any], name: str) -> Document:
        """A document of a Python value, which has no text: its places print as `name.key.key`.

        >>> str(
        ...     Document.of({"layer_quant_config": {"fc.0": 1}}, "Config").place(
        ...         "/layer_quant_config/fc.0"
        ...     )
        ... )
        'Config.layer_quant_config["fc.0"]'
        """
        paths = {pointer_to(*path): path for path in _paths(value)}
        dotted = {pointer: name + "".join(map(_step, path)) for pointer, path in paths.items()}
        nowhere: dict[str, Span] = dict.fromkeys(paths, (0, 0))
        return cls(Text(name, ""), value, nowhere, nowhere, dotted)

    def place(self, pointer: str, *, key: bool = False) -> Place:
        """Where the value (or the key) of `pointer` stands; an array's item has no key, so its
        value is taken.
        """
        if self.dotted:
            return Place(self.dotted[pointer], 0, 0, pointer=pointer)
        span = self.keys.get(pointer, self.values[pointer]) if key else self.values[pointer]
        return self.source.place(span, pointer)

    @cached_property
    def paths_at(self) -> Mapping[str, tuple[str | int, ...]]:
        """The path of the value that stands at a place, by what the place prints as."""
        return {str(self.place(pointer_to(*path))): path for path in _paths(self.value)}

    def at(self, *path: str | int) -> Any:
        """The value at a path."""
        return value_at(self.value, path)

    def __contains__(self, pointer: str) -> bool:
        return pointer in self.values


@dataclass(frozen=True)
class ValidDocument:
    """A document, and the pointers of values that are wrong: they are left out, so that the
    rest can be checked.
    """

    document: Document
    ignored: frozenset[str]

    def get(self, *path: str | int) -> Any:
        """The value at `path`; None if it is not there, null, or to be ignored."""
        value: Any = self.document.value
        for depth, part in enumerate(path):
            reached = (
                isinstance(value, list)
                if isinstance(part, int)
                else isinstance(value, dict) and part in value
            )
            if not reached or (self.ignored and pointer_to(*path[: depth + 1]) in self.ignored):
                return None
            value = value[part]
        return value

    def items(self, *path: str | int) -> list[int]:
        """The indices of the sound items of the list at `path`; none if there is no list."""
        found = self.get(*path)
        return (
            [at for at in range(len(found)) if self.get(*path, at) is not None]
            if isinstance(found, list)
            else []
        )

    def place(self, *path: str | int, key: bool = False) -> Place | None:
        """Where the value (or the key) at `path` stands, if it is there."""
        pointer = pointer_to(*path)
        return self.document.place(pointer, key=key) if pointer in self.document else None


def pointer_to(*path: str | int) -> str:
    """The JSON pointer of a path.

    >>> pointer_to("layer_quantize_config", 0, "a/b")
    '/layer_quantize_config/0/a~1b'
    """
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def value_at(value: Any, path: Iterable[str | int]) -> Any:
    """The member of a JSON value at a path that is there.

    >>> value_at({"exclude": ["stem", "fc"]}, ("exclude", 1))
    'fc'
    """
    for part in path:
        value = value[part]
    return value


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    members = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in members:
        yield from _paths(item, (*path, key))


def _step(part: str | int) -> str:
    return (
        f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{json.dumps(part)}]"
    )
