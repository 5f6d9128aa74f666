"""Write a changed config as its file was laid out: only lines with changed values differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from quantizer.config.diagnostics import Edit
from quantizer.config.document.document import Document, pointer_to
from quantizer.config.json_types import JsonMapping, JsonPath

_MAX_LINE = 72
"""Characters up to which a new object or list is on one line."""
_UNIT = "  "
"""The indentation of files that show none."""


def edited_text(document: Document, value: Any) -> str:
    r"""Return the text of a document in which some values are others.

    >>> from quantizer.config.document.document import Text
    >>> from quantizer.config.document.read import parse_document
    >>> source = Text("net.json", '{"a": [1,2],\n\n "b" : 3}\n')
    >>> edited_text(parse_document(source), {"a": [1, 2], "b": 4, "c": []})
    '{"a": [1,2],\n\n "b" : 4,\n\n "c": []}\n'
    """
    text = document.source.text
    if not text:
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    start, end = document.values[""]
    return text[:start] + _Editor(document).edited((), value) + text[end:]


def insertion(document: Document, path: JsonPath, members: JsonMapping) -> Edit:
    """Return the edit that writes members after the last one of the object at a path, laid out
    as it is.
    """
    editor = _Editor(document)
    start, end = document.values[pointer_to(*path)]
    present = editor.members(path, document.at(*path))
    layout = editor.layout(start, end, present)
    new = [editor.new_member(key, value, layout.indent) for key, value in members.items()]
    text = layout.usual.join(new)
    if present:
        end = present[-1].end
        return Edit(end, end, layout.usual + text)
    return Edit(start + 1, start + 1, layout.opening + text + layout.closing)


@dataclass(frozen=True)
class _Member:
    """A member of an object or list in the text: where it and its value begin and end."""

    key: Any
    start: int
    value_start: int
    end: int


class _Editor:
    """Writes values of one document again, each as far as it changed."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.text = document.source.text
        self.newline = "\r\n" if "\r\n" in self.text else "\n"
        self.unit = self._indentation_unit()

    def edited(self, path: JsonPath, value: Any) -> str:
        """Return the text of the value at a path, with the changes that `value` has."""
        before = self.document.at(*path)
        start, end = self.document.values[pointer_to(*path)]
        if _dumped(before) == _dumped(value):
            return self.text[start:end]
        is_object = isinstance(before, dict) and isinstance(value, dict)
        is_list = isinstance(before, list) and isinstance(value, list)
        if not value or not (is_object or is_list):
            return self._written(value, self._indent_at(start))
        members = self.members(path, before)
        new: list[tuple[str | None, Any]]
        if is_object:
            new = list(value.items())
            pairs = _pairs(list(before), list(value), replaced=False)
        else:
            new = [(None, item) for item in value]
            pairs = _pairs(list(map(_dumped, before)), list(map(_dumped, value)), replaced=True)
        layout = self.layout(start, end, members)
        pieces = [self.text[start], layout.opening]
        previous: int | None = None
        for index, (name, item) in enumerate(new):
            old = pairs.get(index)
            if index:
                separator = layout.usual
                if old is not None and previous == old - 1:
                    separator = layout.separators[old]
                pieces.append(separator)
            if old is None:
                pieces.append(self.new_member(name, item, layout.indent))
            else:
                member = members[old]
                pieces.append(self.text[member.start : member.value_start])
                pieces.append(self.edited((*path, member.key), item))
            previous = old
        return "".join([*pieces, layout.closing, self.text[end - 1]])

    def members(self, path: JsonPath, value: Any) -> list[_Member]:
        """Return the members of the object or list at a path."""
        keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
        members = []
        for key in keys:
            pointer = pointer_to(*path, key)
            value_start, end = self.document.values[pointer]
            start, _ = self.document.keys.get(pointer, (value_start, end))
            members.append(_Member(key, start, value_start, end))
        return members

    def layout(self, start: int, end: int, members: Sequence[_Member]) -> _Layout:
        """Return how the members of an object or list are separated."""
        if not members:
            outer = self.newline + self._indent_at(start)
            return _Layout(outer + self.unit, f",{outer}{self.unit}", {}, outer)
        opening = self.text[start + 1 : members[0].start]
        usual = f",{opening}" if "\n" in opening else ", "
        separators: dict[int, str] = {}
        for index, (member, following) in enumerate(pairwise(members), 1):
            usual = self.text[member.end : following.start]
            separators[index] = usual
        closing = self.text[members[-1].end : end - 1]
        return _Layout(opening, usual, separators, closing)

    def new_member(self, name: str | None, value: Any, indent: str | None) -> str:
        """Return the text of a new member; an item of a list has no name."""
        written = self._written(value, indent)
        if name is None:
            return written
        return f"{json.dumps(name, ensure_ascii=False)}: {written}"

    def _written(self, value: Any, indent: str | None) -> str:
        """Return a new value: on one line if it is short, or if `indent` is None."""
        line = _dumped(value)
        is_nested = isinstance(value, dict | list) and bool(value)
        if indent is None or not is_nested or len(indent) + len(line) <= _MAX_LINE:
            return line
        inner = indent + self.unit
        members = value.items() if isinstance(value, dict) else ((None, item) for item in value)
        parts = [self.new_member(key, item, inner) for key, item in members]
        lines = f",{self.newline}{inner}".join(parts)
        return f"{line[0]}{self.newline}{inner}{lines}{self.newline}{indent}{line[-1]}"

    def _indent_at(self, position: int) -> str:
        """Return the spaces that begin the line of a position."""
        line = self.text[self.text.rfind("\n", 0, position) + 1 : position]
        return line[: len(line) - len(line.lstrip())]

    def _indentation_unit(self) -> str:
        """Return the indentation of the outermost members."""
        spans = [self.document.keys[pointer_to(key)] for key in self.document.value]
        indents = [self._indent_at(start) for start, _ in spans]
        return next(filter(None, indents), _UNIT)


@dataclass(frozen=True)
class _Layout:
    """The texts around the members of an object or list.

    Attributes:
        opening: between the opening bracket and the first member.
        usual: what separates a new member from the one before it.
        separators: what was before each old member but the first.
        closing: between the last member and the closing bracket.
    """

    opening: str
    usual: str
    separators: Mapping[int, str]
    closing: str

    @property
    def indent(self) -> str | None:
        """Return the indentation of members; None if they are on one line."""
        _, newline, indent = self.usual.rpartition("\n")
        return indent if newline else None


def _pairs(old: Sequence[str], new: Sequence[str], *, replaced: bool) -> dict[int, int]:
    """Return for new positions the old position of the same member.

    Args:
        old: what identifies the old members.
        new: what identifies the new ones.
        replaced: whether as many members in the place of others are the same ones, changed.
    """
    pairs = {}
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for kind, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        is_changed = kind == "replace" and old_end - old_start == new_end - new_start
        if kind == "equal" or (replaced and is_changed):
            for offset in range(new_end - new_start):
                pairs[new_start + offset] = old_start + offset
    return pairs


def _dumped(value: Any) -> str:
    """Return a value on one line. Equal lines have equal values in the same order."""
    return json.dumps(value, ensure_ascii=False)
