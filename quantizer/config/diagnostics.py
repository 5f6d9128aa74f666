"""Findings about a config file as values: a code, a sentence, a place. Nothing here prints or
exits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from quantizer.errors import UsageError

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, order=True)
class Place:
    """Where a key or value stands: `line` and `column` count from 1; `length` is in characters
    (the caret's width).

    In a config without text `file` is the path of the value (`Config.exclude[0]`), and `line`
    is 0.
    """

    file: str
    line: int
    column: int
    length: int = 1
    pointer: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Edit:
    """`text`, to be written in place of the characters `start` to `end` of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """Edits that may remove a finding, and the sentence that offers them.

    `is_known`: it is the one known answer, which `--fix` writes; otherwise it is an example.
    `touches` are the pointers of the members that it writes. What is inside the block at
    `uncovers`, which nothing could read before, was wrong before, too. A fix of a later `turn`
    depends on what those of earlier ones write.
    """

    help: str
    edits: tuple[Edit, ...]
    touches: tuple[str, ...] = ()
    is_known: bool = True
    uncovers: str | None = None
    turn: int = 0


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `related` are the other places of the same conflict, each with its own
    remark.

    `fixes` are candidates, the best first. In a loaded file they have been tried: one that is
    known and holds is left, and `help` offers it, or an example that holds.
    """

    code: str
    message: str
    place: Place | None = None
    severity: Severity = "error"
    remark: str | None = None
    help: str | None = None
    related: tuple[tuple[Place, str], ...] = field(default=())
    fixes: Iterable[Fix] = field(default=(), compare=False, repr=False)


def related_to(place: Place | None, remark: str) -> tuple[tuple[Place, str], ...]:
    """What `Diagnostic.related` is for one place; nothing where there is none."""
    return ((place, remark),) if place else ()


class ConfigError(UsageError):
    """A config cannot be used: `diagnostics` say why; `sources` maps a file's shown name to its
    text, for excerpts.
    """

    def __init__(
        self, diagnostics: Sequence[Diagnostic], sources: Mapping[str, str] | None = None
    ) -> None:
        errors = [found for found in diagnostics if found.severity == "error"] or list(
            diagnostics[:1]
        )
        *others, last = (
            (f"{e.place}: {e.message}" if e.place else e.message, e.help) for e in errors
        )
        earlier = "".join(
            f"{line}\nhelp: {help_}\n" if help_ else f"{line}\n" for line, help_ in others
        )
        super().__init__(earlier + last[0], help=last[1])
        self.diagnostics = tuple(diagnostics)
        self.sources = dict(sources or {})


@contextmanager
def pointing_into(sources: Mapping[str, str]) -> Iterator[None]:
    """Findings of what is done inside come with the texts of the files that they point into."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.diagnostics, sources) from error


def in_order(diagnostics: Sequence[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings sorted by place, those of one cause (same code, same place) once, with all
    related places.
    """
    once: dict[tuple[str, Place | None, Severity], Diagnostic] = {}
    for found in diagnostics:
        first = once.setdefault((found.code, found.place, found.severity), found)
        related = tuple(dict.fromkeys((*first.related, *found.related)))
        once[found.code, found.place, found.severity] = replace(first, related=related)
    return by_place(once.values())


def by_place(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings sorted by place, those about the whole file first."""
    nowhere = Place("", 0, 0)
    return tuple(sorted(diagnostics, key=lambda found: (found.place or nowhere, found.code)))
