"""The sound part of a document: what is wrong in it, or null, reads as absent. Knows no form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantizer.config.diagnostics import Place
from quantizer.config.document import Document, pointer_to


@dataclass(frozen=True)
class ValidDocument:
    """A document, and the pointers of values that are wrong: they are left out, so that the rest can be checked."""

    document: Document
    ignored: frozenset[str]

    def get(self, *path: str | int) -> Any:
        """The value at `path`; None if it is not there, null, or to be ignored."""
        value: Any = self.document.value
        for depth, part in enumerate(path):
            reached = isinstance(value, list) if isinstance(part, int) else isinstance(value, dict) and part in value
            if not reached or (self.ignored and pointer_to(*path[: depth + 1]) in self.ignored):
                return None
            value = value[part]
        return value

    def place(self, *path: str | int, key: bool = False) -> Place | None:
        """Where the value (or the key) at `path` stands, if it is there."""
        pointer = pointer_to(*path)
        return self.document.place(pointer, key=key) if pointer in self.document else None
