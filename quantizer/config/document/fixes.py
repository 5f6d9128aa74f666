"""Try proposed fixes on a copy of the file: a fix is offered only if it leaves fewer errors."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from quantizer.config.diagnostics import Diagnostic, Fix, Place
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
    candidates: list[tuple[int, Fix]] = []
    for index, finding in enumerate(findings):
        fixes = list(finding.fixes)
        first_known = next((fix for fix in fixes if fix.is_known), None)
        tried = [fix for fix in fixes if fix is first_known or not fix.is_known]
        candidates += [(index, fix) for fix in tried]
    # Examples come last: `--fix` does not write them, so the other fixes must do without them
    candidates.sort(key=lambda row: (not row[1].is_known, row[1].turn, row[1].edits[0].start))
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
        if errors_left >= errors or _has_error_at(findings[index].place, findings_left):
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
    text = source.text
    edits = [edit for fix in fixes for edit in fix.edits]
    edits.sort(key=lambda edit: (edit.start, edit.end))
    # From the end on, so that places before it stay
    for edit in reversed(edits):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return replace(source, text=text)


def _has_error_at(place: Place | None, findings: Sequence[Diagnostic]) -> bool:
    """Return whether the value that a fix writes breaks another rule."""
    errors = [finding.place for finding in findings if finding.severity == "error"]
    return place is not None and place.pointer in {other.pointer for other in errors if other}


def _count_errors(findings: Iterable[Diagnostic], applied: Iterable[Fix] = ()) -> float:
    """Return the number of errors that the file had before the fixes, as far as they are left,
    or has because of them.

    A syntax error hides all others, so it counts as infinitely many.
    """
    members = {fix.uncovers for fix in applied if fix.uncovers is not None}
    errors = [finding for finding in findings if finding.severity == "error"]
    if any(finding.code.startswith("QZ00") for finding in errors):
        return math.inf
    return sum(not _is_uncovered(finding, members) for finding in errors)


def _is_uncovered(finding: Diagnostic, members: Collection[str]) -> bool:
    """Return whether an error is inside a member that a fix made readable, or is its value."""
    places = [finding.place, *(place for place, _ in finding.related)]
    pointers = [place.pointer for place in places if place]
    if finding.code.startswith("QZ10") and pointers and pointers[0] in members:
        return True
    inside = tuple(f"{member}/" for member in members)
    return any(pointer.startswith(inside) for pointer in pointers)
