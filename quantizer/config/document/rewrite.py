"""Write a changed document as text: what has not changed keeps its text, and what is new has
the layout of the presets.
"""

import json
from typing import Any

from quantizer.config.document.document import (
    Document,
    pointer_to,
)
from quantizer.config.json_types import (
    JsonMapping,
    JsonPath,
)

_INDENT = "  "
_MAX_LINE = 96


def rewritten(
    document: Document,
    value: JsonMapping,
) -> str:
    """Return the text of a document with another value.

    Objects and lists that are equal in both keep their text, comments included.
    """
    text = document.source.text
    start, end = document.values[""]
    changed = _Writer(document).written(value, ())
    return text[:start] + changed + text[end:]


def in_preset_layout(
    value: Any,
    depth: int = 0,
) -> str:
    """Return a JSON value as the presets have it: a key a line, and short lists in one line.

    >>> print(in_preset_layout({"exclude": ["kind:head"]}))
    {
      "exclude": ["kind:head"]
    }
    """
    if isinstance(value, dict) and value:
        members = [
            f"{_quoted(key)}: {in_preset_layout(value[key], depth + 1)}" for key in value
        ]
        return _block("{", members, "}", depth)
    if isinstance(value, list) and value:
        items = [in_preset_layout(item, depth + 1) for item in value]
        return _list(items, depth)
    return _quoted(value)


class _Writer:
    """Writes values beside the text that they have in a document."""

    def __init__(
        self,
        document: Document,
    ) -> None:
        self.document = document

    def written(
        self,
        value: Any,
        path: JsonPath,
    ) -> str:
        """Return the text of a value that stands at a path.

        The text is the document's if the value there is equal.
        """
        depth = len(path)
        pointer = pointer_to(*path)
        if pointer not in self.document:
            return in_preset_layout(value, depth)
        before = self.document.at(*path)
        if _is_same(before, value):
            start, end = self.document.values[pointer]
            return self.document.source.text[start:end]
        if isinstance(value, dict) and isinstance(before, dict) and value:
            members = []
            for key, member in value.items():
                text = self.written(member, (*path, key))
                members.append(f"{_quoted(key)}: {text}")
            return _block("{", members, "}", depth)
        if isinstance(value, list) and isinstance(before, list) and value:
            return _list(self._items(value, before, path), depth)
        return in_preset_layout(value, depth)

    def _items(
        self,
        value: list[Any],
        before: list[Any],
        path: JsonPath,
    ) -> list[str]:
        """Return the texts of a list's items. Those that were there before keep their text."""
        items = []
        for item in value:
            place: JsonPath = (*path, len(before))
            for index, earlier in enumerate(before):
                if _is_same(earlier, item):
                    place = (*path, index)
                    break
            items.append(self.written(item, place))
        return items


def _is_same(
    one: Any,
    other: Any,
) -> bool:
    """Return whether two values have the same JSON. In Python, 1 and true are equal."""
    return json.dumps(one) == json.dumps(other)


def _list(
    items: list[str],
    depth: int,
) -> str:
    """Return a list in one line if it is short and has no blocks, else with an item a line."""
    joined = ", ".join(items)
    line = f"[{joined}]"
    has_blocks = "\n" in line
    width = len(_INDENT) * depth + len(line)
    if has_blocks or width > _MAX_LINE:
        return _block("[", items, "]", depth)
    return line


def _block(
    opening: str,
    lines: list[str],
    closing: str,
    depth: int,
) -> str:
    inner = "\n" + _INDENT * (depth + 1)
    outer = "\n" + _INDENT * depth
    return opening + inner + f",{inner}".join(lines) + outer + closing


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
