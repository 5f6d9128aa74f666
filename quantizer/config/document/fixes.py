"""Try proposed fixes on a copy of the file: a fix is offered only if it leaves fewer errors."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from quantizer.config.diagnostics import Diagnostic, Edit, Fix, Place
from quantizer.config.document.document import Text

FileCheck = Callable[[Text], Sequence[Diagnostic]]
"""A function from a file's text to all findings on it."""

MAX_TRIALS = 200
MAX_TRIED_CHARACTERS = 1_000_000
"""All trials of one file check at most so many characters."""


def with_sound_fixes(
    source: Text, findings: Sequence[Diagnostic], check: FileCheck
) -> tuple[Diagnostic, ...]:
    """Return the findings, each with its known fix if that leaves fewer errors in the file.

    The help of a finding offers this fix. Without one it offers the first example that leaves
    fewer errors.
    """
    max_trials = min(MAX_TRIALS, MAX_TRIED_CHARACTERS // (len(source.text) + 1))
    # Examples come last: `--fix` does not write them, so the other fixes must do without them
    candidates = sorted(_candidates(findings), key=lambda candidate: _order(candidate[1]))
    checked = [replace(finding, fixes=()) for finding in findings]
    helped: set[int] = set()
    accepted: list[Fix] = []
    errors = _count_errors(findings)
    for index, fix in candidates[:max_trials]:
        if index in helped:
            continue
        tried = [*accepted, fix]
        findings_left = check(apply_fixes(source, tried))
        errors_left = _count_errors(findings_left, tried)
        place = findings[index].place
        if errors_left >= errors or _has_error_at(place, findings_left):
            continue
        helped.add(index)
        checked[index] = replace(checked[index], help=fix.help)
        if fix.is_known:
            checked[index] = replace(checked[index], fixes=(fix,))
            accepted = tried
            errors = errors_left
    return tuple(checked)


def apply_fixes(source: Text, fixes: Iterable[Fix]) -> Text:
    """Return the text with all the fixes in it; nothing else of it changes."""
    edits: list[Edit] = []
    for fix in fixes:
        edits += fix.edits
    edits.sort(key=lambda edit: (edit.start, edit.end))
    pieces: list[str] = []
    end = 0
    for edit in edits:
        pieces += [source.text[end : edit.start], edit.text]
        end = edit.end
    pieces.append(source.text[end:])
    return replace(source, text="".join(pieces))


def _has_error_at(place: Place | None, findings: Sequence[Diagnostic]) -> bool:
    """Return whether the value that a fix writes breaks another rule."""
    if place is None:
        return False
    for finding in findings:
        if finding.severity != "error" or finding.place is None:
            continue
        if finding.place.pointer == place.pointer:
            return True
    return False


def _candidates(findings: Sequence[Diagnostic]) -> Iterator[tuple[int, Fix]]:
    """Yield the first known fix and all examples of each finding, with the finding's index."""
    for index, finding in enumerate(findings):
        has_remedy = False
        for fix in finding.fixes:
            if not fix.is_known or not has_remedy:
                yield index, fix
            has_remedy = has_remedy or fix.is_known


def _order(fix: Fix) -> tuple[bool, int, int]:
    return not fix.is_known, fix.turn, fix.edits[0].start


def _count_errors(findings: Iterable[Diagnostic], applied: Iterable[Fix] = ()) -> float:
    """Return the number of errors that the file had before the fixes, as far as they are left,
    or has because of them.

    A syntax error hides all others, so it counts as infinitely many.
    """
    members = [fix.uncovers for fix in applied if fix.uncovers is not None]
    count = 0
    for finding in findings:
        if finding.severity != "error":
            continue
        if finding.code.startswith("QZ00"):
            return math.inf
        if not _is_uncovered(finding, members):
            count += 1
    return count


def _is_uncovered(finding: Diagnostic, members: Collection[str]) -> bool:
    """Return whether an error is inside a member that a fix made readable, or is its value."""
    places = [finding.place, *(place for place, _ in finding.related)]
    pointers = [place.pointer for place in places if place]
    is_value = finding.code.startswith("QZ10") and pointers[:1] != [] and pointers[0] in members
    if is_value:
        return True
    for pointer in pointers:
        if any(pointer.startswith(f"{member}/") for member in members):
            return True
    return False
