"""Findings about a config file as values: a code, a sentence, a place."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantizer.errors import UsageError
from quantizer.option_words import Sentence, marked_text
from quantizer.printable import one_line

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, order=True)
class Place:
    """Where a key or value is: `line` and `column` count from 1, `length` is the caret's
    width in characters.

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
    """A text that replaces the characters `start` to `end` of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """Edits that may remove a finding, and the sentence that offers them.

    `is_known` fixes are the one known answer, which `--fix` writes; the others are examples.
    Errors inside the block at `uncovers` do not count against the fix: nothing could read that
    block before. A fix of a later `turn` depends on what fixes of earlier turns write.
    """

    help: str
    edits: tuple[Edit, ...]
    is_known: bool = True
    uncovers: str | None = None
    turn: int = 0


@dataclass(frozen=True)
class Diagnostic:
    """A finding. `related` are the other places of the same conflict, each with a note.

    `fixes` are candidates, the best first. In a loaded file they have been tried: a known fix
    that leaves fewer errors is left, and `help` offers it, or such an example.
    """

    code: str
    message: str
    place: Place | None = None
    severity: Severity = "error"
    remark: str | None = None
    help: str | None = None
    related: tuple[tuple[Place, str], ...] = field(default=())
    fixes: Iterable[Fix] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", Sentence(self.message))
        if self.help is not None:
            object.__setattr__(self, "help", Sentence(self.help))


Diagnostics = Iterator[Diagnostic]


def related_to(place: Place | None, remark: str) -> tuple[tuple[Place, str], ...]:
    """Return `Diagnostic.related` for one place; nothing without a place."""
    return ((place, remark),) if place else ()


class ConfigError(UsageError):
    """A config cannot be used: `diagnostics` say why; `sources` maps a file's shown name to its
    text, for excerpts.
    """

    def __init__(
        self, diagnostics: Sequence[Diagnostic], sources: Mapping[str, str] | None = None
    ) -> None:
        self.diagnostics = tuple(diagnostics)
        self.sources = dict(sources or {})
        first = self._errors[0]
        super().__init__(with_place(first), help=first.help)

    @property
    def _errors(self) -> list[Diagnostic]:
        """Return the findings that are errors; if none is, the first finding."""
        errors = [finding for finding in self.diagnostics if finding.severity == "error"]
        return errors or [self.diagnostics[0]]

    def __str__(self) -> str:
        """Return all errors with their helps, each on a line, for callers from Python."""
        lines: list[str] = []
        for finding in self._errors:
            lines.append(with_place(finding))
            if finding.help:
                lines.append(f"help: {finding.help}")
        return "\n".join(map(one_line, lines))

    def reworded(self, change: Callable[[str], str]) -> None:
        """Replace the texts, also those of the findings, by what `change` makes of them."""
        super().reworded(change)
        findings = []
        for finding in self.diagnostics:
            message = change(marked_text(finding.message))
            remedy = None if finding.help is None else change(marked_text(finding.help))
            findings.append(replace(finding, message=message, help=remedy))
        self.diagnostics = tuple(findings)


def is_syntax(finding: Diagnostic) -> bool:
    """Return whether a finding is about the text of a file, not about what it says."""
    return finding.code.startswith("QZ00")


def with_place(finding: Diagnostic) -> Sentence:
    """Return the message of a finding after its place, if it has one."""
    message = marked_text(finding.message)
    if finding.place:
        message = f"{finding.place}: {message}"
    return Sentence(message)


@contextmanager
def pointing_into(sources: Mapping[str, str]) -> Iterator[None]:
    """Raise a `ConfigError` of the code inside again, with the texts of the files that its
    findings point into.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.diagnostics, sources) from error


def merged_by_cause(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the findings sorted by place; those of the same code and place are one finding
    with all related places.
    """
    merged: dict[tuple[str, Place | None, Severity], Diagnostic] = {}
    for finding in diagnostics:
        cause = (finding.code, finding.place, finding.severity)
        first = merged.setdefault(cause, finding)
        related = tuple(dict.fromkeys((*first.related, *finding.related)))
        merged[cause] = replace(first, related=related)
    return by_place(merged.values())


def by_place(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the findings sorted by place, those about the whole file first."""
    nowhere = Place("", 0, 0)
    ordered = sorted(diagnostics, key=lambda finding: (finding.place or nowhere, finding.code))
    return tuple(ordered)


@dataclass(frozen=True)
class Sourced:
    """A value and where it came from; `place` is None for a built-in default."""

    value: Any
    place: Place | None = None

    @property
    def origin(self) -> str:
        """Return `file:line:column`, or "default"."""
        return str(self.place) if self.place else "default"
