"""Findings about a config file as values: a code, a sentence, a place. Nothing here prints or exits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, order=True)
class Place:
    """Where a key or value stands: `line` and `column` count from 1; `length` is in characters (the caret's width)."""

    file: str
    line: int
    column: int
    length: int = 1
    pointer: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `related` are the other places of the same conflict, each with its own remark."""

    code: str
    message: str
    place: Place | None = None
    severity: Severity = "error"
    remark: str | None = None
    help: str | None = None
    related: tuple[tuple[Place, str], ...] = field(default=())
